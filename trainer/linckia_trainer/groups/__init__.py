"""Groups: the actors that live and die together.

``member``: a rank with a control surface. ``model_member``: a rank that holds a model and, if stateful, folds the log.
``engine``: DeepSpeed around a module. ``saver``: states out of the member, written behind. ``placement``: a plan
becomes placement groups. ``group``: ``ActorGroup`` with ``call`` and ``call_sharded``. ``fence`` and ``replace``: a lost generation
becomes the next. ``leftovers`` and ``keeper``: what is left of a run in the cluster, and who removes it.
"""
