//! The library's example runs, as the README says.

#[test]
fn example_succeeds() {
    let own = std::env::current_exe().expect("this program");
    let build_folder = own.ancestors().nth(2).expect("a build folder");
    let example = build_folder.join("examples/move_connection");
    let output = std::process::Command::new(&example)
        .output()
        .unwrap_or_else(|error| panic!("{}: {error}", example.display()));
    let text = String::from_utf8_lossy(&output.stdout);
    eprintln!("{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}", output.status);
}
