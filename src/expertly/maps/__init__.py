"""Files of expert maps: written and read, merged, measured. Imports core and policies only."""
