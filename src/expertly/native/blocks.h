/* The tables of GGUF's types, whose numbers the package gguf has. */

/* Grids of 4 or 8 neighbouring weights, and for IQ4_NL and IQ4_XS the 16 values of a code, more by 128. */
static struct {
    int8_t iq2_xxs[256][8], iq2_xs[512][8], iq2_s[1024][8], iq3_xxs[256][4], iq3_s[512][4], iq1_s[2048][8];
    uint8_t iq4_nl[16];
} GRIDS;
