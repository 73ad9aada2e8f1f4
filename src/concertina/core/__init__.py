"""The shared vocabulary: jobs, clusters, plans, errors. Validation, no behaviour, standard library alone."""
