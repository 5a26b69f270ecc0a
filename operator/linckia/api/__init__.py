"""The contract between the control plane and the data plane. Light: no torch, ray, vllm, deepspeed or transformers.

- ``config``      the run config; ``load`` reads it, ``explain`` says what is wrong with it
- ``plan``        where a run's actors go; ``plan_view`` shows it, ``resources`` counts
- ``names``       every name and label in the Ray cluster
- ``errors``      what a user is told
"""
