"""What researchers use: recordings, profiles of models, training of predictors, comparisons, tuning. May import engine
and sim; imported by the command line alone.
"""
