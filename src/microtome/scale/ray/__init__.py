"""microtome on Ray: stages as a Ray Serve application, data sets and profiles over a cluster.

Needs `microtome[ray]`.
"""
