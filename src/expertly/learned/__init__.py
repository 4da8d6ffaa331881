"""The learned predictor's weights: trained on a trace, judged on requests that were kept back, saved to a file. Imports
core, policies, maps (for sealed files), sim (for whose requests are whose) and trace; `train` alone imports torch.
"""
