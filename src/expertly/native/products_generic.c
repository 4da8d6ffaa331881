/* The arithmetic in portable C, with what every processor of aarch64 has. */

#include "products.h"

#define V 4
#define NAME(f) f##_generic
#define LABEL "generic"
#ifdef __aarch64__
#include "arm.h"
#endif
#include "products_body.h"
