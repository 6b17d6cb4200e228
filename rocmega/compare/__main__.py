from rocmega.compare.command import main

main()
