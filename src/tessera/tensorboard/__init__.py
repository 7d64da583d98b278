"""The TensorBoard plugin: the page of a run, served from what `profile.session(tensorboard_dir=...)` wrote.

::

    tensorboard --logdir runs        # any folder with .tessera files in it, at any depth

TensorBoard finds `plugin.TesseraPlugin` by its entry point. It needs TensorBoard 2.21 or newer and no TensorFlow.
"""
