//! Programs and daemons that reach their limit of open files.

use std::os::fd::AsFd;
use std::process::Command;

use crate::common::{World, says};
use crate::strange::{Strange, both_speak, connection, listener_in};

/// Limit of open files, below the number that the process has open.
const NO_MORE: &str = "3";

/// Lowers a process's limit of open files, and restores the limit when dropped.
struct Full {
    pid: i32,
    before: String,
}

impl Full {
    fn new(pid: i32) -> Self {
        let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
        let line = limits
            .lines()
            .find(|line| line.starts_with("Max open files"));
        let before = line.unwrap().split_whitespace().nth(3).unwrap().to_owned();
        set_limit(pid, NO_MORE);
        Self { pid, before }
    }
}

impl Drop for Full {
    fn drop(&mut self) {
        set_limit(self.pid, &self.before);
    }
}

/// Sets the soft limit only.
fn set_limit(pid: i32, soft: &str) {
    let mut command = Command::new("prlimit");
    command.args(["--pid", &pid.to_string(), &format!("--nofile={soft}:")]);
    assert!(command.status().unwrap().success());
}

#[test]
fn no_descriptor_left() {
    let Some(world) = World::up("full") else {
        return;
    };
    let flow = world.flow(0);
    let sessions = |world: &World, node: &str| {
        let directory = world.cluster.directory();
        let log = std::fs::read_to_string(directory.join(format!("{node}.holdfastd.log")));
        log.unwrap().matches("a server program has come").count()
    };
    let before = ["n2", "n3"].map(|node| sessions(&world, node));

    let program = world.cluster.program_pid("n3", "echo").unwrap().unwrap();
    let full = Full::new(program);
    says(
        world.stays("n2", flow, "n3"),
        &["refused", "the program has no descriptor left"],
    );
    world.unharmed();
    drop(full);
    world.moves("n2", flow, "n3");
    world.moves("n3", flow, "n2");

    let donor = world.cluster.daemon_pid("n2").unwrap().unwrap();
    let listener = listener_in(&world, "n2", world.odd(), false);
    let odd = Strange::open(&world, "n2");
    let (mut client, mut server, of_odd) = connection(&world, &listener);
    odd.accepted(of_odd);
    let full = Full::new(donor);
    odd.hand_off(of_odd, "n3", Some(server.as_fd()));
    says(odd.kept(of_odd), &["the daemon has no descriptor left"]);
    drop(full);
    both_speak(&mut client, &mut server);
    // The program's session with the daemon goes on.
    odd.hand_off(of_odd, "n3", Some(server.as_fd()));
    says(odd.kept(of_odd), &["no server program on node n3 serves"]);
    world.unharmed();

    let acceptor = world.cluster.daemon_pid("n3").unwrap().unwrap();
    let full = Full::new(acceptor);
    says(world.stays("n2", flow, "n3"), &["Too many open files"]);
    drop(full);
    world.unharmed();
    world.moves("n2", flow, "n3");
    let after = ["n2", "n3"].map(|node| sessions(&world, node));
    assert_eq!(after, [before[0] + 1, before[1]], "a session began anew");
    world.end();
}
