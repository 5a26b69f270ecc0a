"""What can be seen of a run from outside its members. Unknown is not dead: what did not answer is None, never "gone".

- ``observation``  what the watcher saw at one moment, as plain frozen records
- ``ray_state``    actors, nodes and placement groups from Ray's state API, over REST
"""
