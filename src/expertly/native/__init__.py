"""Products of few tokens with matrices in the machine's memory, compiled where there is a C compiler, else torch's. May
import core and torch.
"""
