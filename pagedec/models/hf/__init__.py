"""Models that run through transformers' own modeling code, with the paged cache's attention in place of its own.

Read in this order:

- `attention`: the function that modeling code calls in place of its attention, and who answers the call.
- `probe`: looking at a model: does everything that one row takes from others pass through those calls?
- `hosted_architecture`: which configurations can run, decided before any weight is read.
- `hosted_weights`: what its files hold, by transformers' own loader.
- `hosted_model`: the model with its weights, and a step of it.
"""
