from rocmega.selftest.command import main

main()
