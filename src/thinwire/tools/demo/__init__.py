"""`thinwire demo`: a trained MoE model, split over CPU ranks; its weights and its held-out text lie here."""
