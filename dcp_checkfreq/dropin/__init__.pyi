from .switch import Installed as Installed, install as install, uninstall as uninstall
