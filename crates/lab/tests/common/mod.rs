//! Common functions of the lab's tests.
#![allow(dead_code)]

use std::io;
use std::net::UdpSocket;
use std::process::{Command, Output};

use holdfast_lab::{Lab, LabSpec};

/// Returns a spec with a name that no other test run on the machine uses.
pub fn spec(test: &str) -> LabSpec {
    let name = format!("t-{test}-{}", std::process::id());
    LabSpec::new(&name).program(env!("CARGO_BIN_EXE_holdfast-lab"))
}

/// Returns true if the test can run; otherwise prints that it is skipped.
pub fn is_root() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        eprintln!("skipped: a lab needs root");
    }
    root
}

/// Runs a shell script inside a host.
pub fn sh(lab: &Lab, host: &str, script: &str) -> Output {
    lab.command(host)
        .unwrap()
        .args(["sh", "-c", script])
        .output()
        .unwrap()
}

/// Returns the output of a shell script inside a host; the script must succeed.
#[track_caller]
pub fn output_of(lab: &Lab, host: &str, script: &str) -> String {
    let output = sh(lab, host, script);
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(
        output.status.success(),
        "{host}: {script}: {}\n{out}{err}",
        output.status
    );
    out.trim().to_owned()
}

/// Returns true if the machine lists a process with `text` in its command line.
pub fn is_running(text: &str) -> bool {
    let output = Command::new("ps").args(["-eo", "args"]).output().unwrap();
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .any(|line| line.contains(text))
}

/// Receives from a socket with a timeout. A stopped and continued process has not reached the timeout.
pub fn receive(socket: &UdpSocket, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match socket.recv(buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            received => return received,
        }
    }
}
