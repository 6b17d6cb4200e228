from rocmega.cli import main

if __name__ == "__main__":
    main()
