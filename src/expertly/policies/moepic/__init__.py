"""MoEpic's cache configurator (sections 3.3 and 3.4): what each layer keeps of how many experts. Imports core and LCP's
priority only.
"""
