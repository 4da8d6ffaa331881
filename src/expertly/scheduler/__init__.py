"""Decides what is where: slots, admission, eviction, order. Pure; imports core and policies."""
