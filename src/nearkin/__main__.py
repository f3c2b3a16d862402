"""python -m nearkin"""

from nearkin.cli import main

main()
