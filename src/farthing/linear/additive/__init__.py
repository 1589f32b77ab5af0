"""Models beyond linear: additive shapes of single features, and boosted trees of several, on public bins.

`bins` cuts declared bounds into cells, `basis` turns noisy histograms into coordinates, `sums` are what a
record contributes, `method` is the training algorithm and `estimators` are its scikit-learn faces.
"""
