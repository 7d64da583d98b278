"""The TensorBoard plugin: serves the page of each run that `profile.session(tensorboard_dir=...)` wrote.

::

    tensorboard --logdir runs        # any folder with .tessera files in it, at any depth

TensorBoard finds `plugin.TesseraPlugin` by its entry point. It needs TensorBoard 2.21 or newer and no TensorFlow.
"""
