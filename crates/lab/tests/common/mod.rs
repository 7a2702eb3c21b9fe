//! What the lab's tests share.
#![allow(dead_code)]

use std::io;
use std::net::UdpSocket;
use std::process::{Command, Output};

use holdfast_lab::{Lab, Spec};

/// A spec whose lab no other test run on the machine has.
pub fn spec(test: &str) -> Spec {
    let name = format!("t-{test}-{}", std::process::id());
    Spec::new(&name).program(env!("CARGO_BIN_EXE_holdfast-lab"))
}

/// Whether the test can run at all; says so where it cannot.
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

/// The output of a shell script inside a host, which must succeed.
#[track_caller]
pub fn ask(lab: &Lab, host: &str, script: &str) -> String {
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

/// Whether the machine lists a process with this in its command line.
pub fn runs(text: &str) -> bool {
    let output = Command::new("ps").args(["-eo", "args"]).output().unwrap();
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .any(|line| line.contains(text))
}

/// What comes to a socket that has a limit of time. One that is stopped for a while and goes on has not reached it.
pub fn receive(socket: &UdpSocket, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match socket.recv(buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            received => return received,
        }
    }
}
