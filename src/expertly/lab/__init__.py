"""What researchers use: recordings, profiles of models, training of predictors."""
