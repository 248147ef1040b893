"""Import microtome as a user does, before pytest's importlib mode imports a file of it alone.

That mode would bind `microtome.profile` to the package of this name, not to the function.
"""

import microtome  # noqa: F401
