//! Tests of `./x` on machines without some prerequisites, simulated by replacements for the system's programs.
#![forbid(unsafe_code)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

/// User ID of `nobody`, a user without privileges.
const NOBODY: u32 = 65534;

/// A folder of programs that PATH finds before the system's.
struct FakeMachine {
    folder: TempDir,
}

impl FakeMachine {
    fn new() -> FakeMachine {
        let machine = FakeMachine {
            folder: TempDir::new().expect("a temporary folder"),
        };
        // Replace these for every test, so that no test can change the machine it runs on.
        machine.add_program("apt-get", "echo \"apt-get $*\" >>\"${0%/*}/calls\"");
        machine.add_program("rustup", "echo \"rustup $*\" >>\"${0%/*}/calls\"");
        machine.add_program("curl", "echo \"curl $*\" >>\"${0%/*}/calls\"; exit 6");
        fs::set_permissions(machine.folder.path(), fs::Permissions::from_mode(0o755))
            .expect("permissions of a new file can be set");
        machine
    }

    fn add_program(&self, name: &str, body: &str) -> &FakeMachine {
        let path = self.folder.path().join(name);
        fs::write(&path, format!("#!/bin/bash\n{body}\n")).expect("the folder is writable");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))
            .expect("permissions of a new file can be set");
        self
    }

    /// Simulates a machine with every package but these.
    fn without_packages(&self, missing: &str) -> &FakeMachine {
        self.add_program(
            "dpkg-query",
            &format!("[[ \" {missing} \" == *\" ${{@: -1}} \"* ]] || echo -n installed"),
        )
    }

    fn x_command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(checkout().join("x"));
        let path = format!(
            "{}:/usr/sbin:/usr/bin:/sbin:/bin",
            self.folder.path().display()
        );
        // Use a separate home, so that neither the caller's cargo nor its caches have an effect.
        command
            .args(arguments)
            .env_clear()
            .env("PATH", path)
            .env("HOME", self.folder.path());
        command
    }

    /// Returns the recorded calls of the replacements.
    fn recorded_calls(&self) -> String {
        fs::read_to_string(self.folder.path().join("calls")).unwrap_or_default()
    }
}

fn checkout() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask lies in the checkout")
        .to_path_buf()
}

fn all_output(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

fn run(command: &mut Command) -> (Option<i32>, String) {
    let output = command.output().expect("bash runs the script");
    (output.status.code(), all_output(&output))
}

fn is_root() -> bool {
    let (_, id) = run(Command::new("id").arg("-u"));
    id.trim() == "0"
}

#[test]
fn script_without_arguments_lists_commands() {
    let (status, text) = run(&mut FakeMachine::new().x_command(&[]));
    assert_eq!(status, Some(0));
    for command in [
        "demo",
        "test",
        "test-real",
        "build",
        "package",
        "bench",
        "docs",
    ] {
        assert!(
            text.lines()
                .any(|line| line.trim_start().starts_with(command)),
            "{command} in\n{text}"
        );
    }
}

#[test]
fn unknown_command_is_refused() {
    let (status, text) = run(&mut FakeMachine::new().x_command(&["tets"]));
    assert_eq!(status, Some(2));
    assert!(text.contains("no command tets"), "{text}");
}

#[test]
fn script_without_root_stops_with_message() {
    let machine = FakeMachine::new();
    machine.without_packages("tshark gcc");
    for name in ["demo", "test", "test-real", "bench"] {
        // A user without privileges may not be able to read the checkout: run a copy.
        let copy = copy_of_script();
        let mut command = Command::new("/bin/bash");
        command
            .arg(copy.path().join("x"))
            .arg(name)
            .env_clear()
            .current_dir("/");
        command.env(
            "PATH",
            format!(
                "{}:/usr/sbin:/usr/bin:/sbin:/bin",
                machine.folder.path().display()
            ),
        );
        if is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        let (status, text) = run(&mut command);
        assert_eq!(status, Some(1), "{text}");
        assert!(text.contains(&format!("`./x {name}` needs root")), "{text}");
        assert_eq!(machine.recorded_calls(), "");
    }
}

/// Copies the script and the files it sources, readable by everyone.
fn copy_of_script() -> TempDir {
    let copy = TempDir::new().expect("a temporary folder");
    fs::create_dir(copy.path().join("scripts")).expect("the folder is writable");
    for file in ["x", "scripts/setup.sh", "scripts/steps.sh"] {
        fs::copy(checkout().join(file), copy.path().join(file)).expect("the script is there");
    }
    fs::set_permissions(copy.path(), fs::Permissions::from_mode(0o755))
        .expect("permissions of a new file can be set");
    copy
}

#[test]
fn old_kernel_is_refused_before_installation() {
    if !is_root() {
        // The check for root comes first; see the test above.
        return;
    }
    let machine = FakeMachine::new();
    machine.without_packages("tshark").add_program(
        "uname",
        "[[ $1 == -r ]] && echo 6.1.0-18-amd64 || echo Linux",
    );
    let (status, text) = run(&mut machine.x_command(&["test"]));
    assert_eq!(status, Some(1), "{text}");
    assert!(
        text.contains("Linux 6.1.0-18-amd64 is too old") && text.contains("6.12"),
        "{text}"
    );
    assert_eq!(machine.recorded_calls(), "");
}

#[test]
fn missing_packages_are_named_before_installation() {
    if !is_root() {
        return;
    }
    let machine = FakeMachine::new();
    machine.without_packages("clang libbpf-dev");
    machine.add_program(
        "apt-get",
        "echo \"apt-get $*\" >>\"${0%/*}/calls\"; [[ $* != *install* ]]",
    );
    let (status, text) = run(&mut machine.x_command(&["build"]));
    assert_eq!(status, Some(1), "{text}");
    let packages_position = text.find("clang libbpf-dev (to build: ").expect(&text);
    assert!(
        packages_position
            < text
                .find("could not install: clang libbpf-dev")
                .expect(&text),
        "{text}"
    );
    let calls = machine.recorded_calls();
    assert!(
        calls
            .lines()
            .last()
            .is_some_and(|call| call.ends_with("--no-install-recommends clang libbpf-dev")),
        "{calls}"
    );
}

#[test]
fn missing_cargo_reports_unreachable_rustup() {
    let machine = FakeMachine::new();
    machine.without_packages("");
    let (status, text) = run(machine
        .x_command(&["build"])
        .env("PATH", path_without_cargo(&machine)));
    assert_eq!(status, Some(1), "{text}");
    assert!(
        text.contains("there is no cargo: installing Rust"),
        "{text}"
    );
    assert!(text.contains("cannot fetch rustup"), "{text}");
    assert!(
        machine.recorded_calls().contains("https://sh.rustup.rs"),
        "{}",
        machine.recorded_calls()
    );
}

#[test]
fn old_cargo_is_named_and_updated_by_rustup() {
    let machine = FakeMachine::new();
    machine
        .without_packages("")
        .add_program("cargo", "echo 'cargo 1.63.0'");
    let (status, text) = run(&mut machine.x_command(&["build"]));
    assert_eq!(status, Some(1), "{text}");
    assert!(
        text.contains("cargo 1.63.0 at ")
            && text.contains("is too old: Holdfast needs 1.88 or newer"),
        "{text}"
    );
    assert!(
        machine
            .recorded_calls()
            .starts_with("rustup toolchain install "),
        "{}",
        machine.recorded_calls()
    );
    // The simulated rustup installs nothing, as the script detects.
    assert!(
        text.contains("no usable cargo after installation (found: 1.63.0)"),
        "{text}"
    );
}

#[test]
fn failed_step_is_counted_and_others_still_run() {
    if !is_root() {
        return;
    }
    let machine = FakeMachine::new();
    machine.without_packages("").add_program(
        "cargo",
        r#"case "$*" in
        --version) echo 'cargo 1.99.0' ;;
        "fmt --all --check") exit 1 ;;
        test*) printf '%s\n' 'test result: ok. 5 passed; 0 failed; 0 ignored' 'test result: FAILED. 2 passed; 1 failed;'; exit 101 ;;
        doc*) echo 'documented' ;;
        esac"#,
    );
    let (status, text) = run(&mut machine.x_command(&["test"]));
    assert_eq!(status, Some(1), "{text}");
    assert!(text.contains("documented"), "{text}");
    // Tests that do not run leave no captures.
    let steps = "failed: Format\nfailed: Tests\nfailed: Captures\n";
    assert!(text.contains(steps), "{text}");
    assert_eq!(text.lines().last(), Some("7 passed, 3 failed"), "{text}");
}

/// Returns a PATH without the system's cargo.
fn path_without_cargo(machine: &FakeMachine) -> String {
    for name in [
        "bash", "env", "readlink", "dirname", "basename", "cksum", "cut", "sort", "head", "mktemp",
        "rm", "sh",
    ] {
        let found = ["/usr/bin", "/bin"]
            .iter()
            .map(|folder| Path::new(folder).join(name))
            .find(|path| path.exists());
        let link = machine.folder.path().join(name);
        std::os::unix::fs::symlink(found.expect("every Debian has it"), link)
            .expect("the folder is writable");
    }
    machine.folder.path().display().to_string()
}
