//! The `farrier` command.

fn main() -> std::process::ExitCode {
    farrier::cli::main()
}
