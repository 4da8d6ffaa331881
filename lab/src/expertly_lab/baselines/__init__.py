"""Systems of other authors that the papers compare with, and bounds."""
