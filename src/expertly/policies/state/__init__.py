"""Files of what was learned: expert maps and activation matrices, written, read, merged, measured; and what seals them.
Imports core and policies only.
"""
