//! Tests of hosts, segments, commands inside hosts, and complete removal.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{IpAddr, TcpListener, TcpStream},
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use holdfast_lab::{Error, Lab, list, prune};

mod common;
use common::{is_root, output_of, sh, spec};

/// Sends a line from one host to another over TCP and receives it back.
fn assert_echo(lab: &Lab, from: &str, to: &str, address: IpAddr) {
    let listener = lab
        .run_in_net_namespace(to, || TcpListener::bind((address, 0)))
        .unwrap()
        .unwrap();
    let target = listener.local_addr().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut line = [0; 5];
            stream.read_exact(&mut line).unwrap();
            stream.write_all(&line).unwrap();
        });
        let connect = || TcpStream::connect_timeout(&target, Duration::from_secs(30));
        let mut stream = lab.run_in_net_namespace(from, connect).unwrap().unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        stream.write_all(b"hello").unwrap();
        let mut answer = [0; 5];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"hello");
    });
}

#[test]
fn every_host_reaches_every_other_over_ipv4_and_ipv6() {
    if !is_root() {
        return;
    }
    for segments in [1, 2] {
        let started = Instant::now();
        let lab = Lab::up(
            &spec(&format!("all{segments}"))
                .nodes(3)
                .clients(2)
                .segments(segments),
        )
        .unwrap();
        eprintln!("{segments} segments: up after {:?}", started.elapsed());
        for from in lab.hosts() {
            for to in lab.hosts() {
                assert_echo(&lab, &from.name, &to.name, to.v4.into());
                assert_echo(&lab, &from.name, &to.name, to.v6.into());
            }
        }
        lab.down().unwrap();
    }
}

#[test]
fn host_sees_only_itself() {
    if !is_root() {
        return;
    }
    let lab = Lab::up(&spec("alone").nodes(2)).unwrap();
    assert_eq!(output_of(&lab, "n1", "hostname"), "n1");
    assert_eq!(output_of(&lab, "n1", "cat /proc/1/comm"), "holdfast-lab");
    assert_eq!(output_of(&lab, "n1", "ls /sys/class/net"), "eth0\nlo");
    assert_eq!(
        output_of(&lab, "n1", "cat /sys/class/net/eth0/address"),
        lab.host("n1").unwrap().mac.to_string()
    );
    assert_eq!(output_of(&lab, "n1", "ls /run"), "holdfast");
    assert_eq!(output_of(&lab, "n1", "stat -f -c %T /sys/fs/bpf"), "bpf_fs");
    assert_eq!(
        output_of(&lab, "n1", "cat /proc/self/cgroup | grep ^0:"),
        "0::/"
    );
    assert_eq!(
        output_of(&lab, "n1", "echo $HOLDFAST_LAB $HOLDFAST_HOST"),
        format!("{} n1", lab.name())
    );
    assert_eq!(
        output_of(&lab, "n1", "stat -f -c %T $HOLDFAST_CGROUP"),
        "cgroup2fs"
    );
    // The command itself is in the group that the host sees at this path, and on the machine in the host's group.
    output_of(&lab, "n1", "grep -qx $$ $HOLDFAST_CGROUP/cgroup.procs");
    output_of(
        &lab,
        "n1",
        "touch /run/holdfast/mine && test -e /run/holdfast/mine",
    );
    assert!(
        !sh(&lab, "n2", "test -e /run/holdfast/mine")
            .status
            .success()
    );
    assert!(!Path::new("/run/holdfast/mine").exists());
    assert_eq!(
        output_of(&lab, "n1", "cat /proc/sys/net/core/somaxconn"),
        "8192"
    );
    let entries = output_of(&lab, "n1", "cat /proc/sys/net/ipv4/tcp_ehash_entries");
    assert_eq!(
        entries, "16384",
        "the host needs its own table; a shared one has a minus sign"
    );
    assert_eq!(
        output_of(&lab, "n1", "ip -6 -o addr show dev eth0 tentative"),
        ""
    );
}

#[test]
fn command_in_host_keeps_directory_exit_code_and_streams() {
    if !is_root() {
        return;
    }
    let lab = Lab::up(&spec("exec")).unwrap();
    assert_eq!(sh(&lab, "n1", "exit 42").status.code(), Some(42));
    assert_eq!(sh(&lab, "n1", "kill -9 $$").status.code(), Some(137));
    let missing = lab
        .command("n1")
        .unwrap()
        .arg("/no/such/program")
        .output()
        .unwrap();
    assert_eq!(missing.status.code(), Some(127));
    assert!(matches!(lab.command("n9"), Err(Error::NoHost { .. })));
    // The caller's working directory, input and output are used.
    let mut child = lab.command("c1").unwrap();
    child
        .args(["sh", "-c", "pwd; cat"])
        .current_dir("/usr")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut child = child.spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"through\n").unwrap();
    assert_eq!(child.wait_with_output().unwrap().stdout, b"/usr\nthrough\n");
}

/// Starts a shell in `n1` and returns the first line of its output: its own PID in the host.
fn start_shell(lab: &Lab, script: &str) -> (std::process::Child, String) {
    let mut command = lab.command("n1").unwrap();
    command.args(["sh", "-c", script]).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap())
        .read_line(&mut line)
        .unwrap();
    (child, line.trim().to_owned())
}

fn wait_for_exit(lab: &Lab, pid: &str) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while sh(lab, "n1", &format!("test -e /proc/{pid}"))
        .status
        .success()
    {
        assert!(
            Instant::now() < deadline,
            "exceeded time: process {pid} is still running"
        );
    }
}

#[test]
fn killing_the_command_kills_the_program() {
    if !is_root() {
        return;
    }
    let lab = Lab::up(&spec("kill")).unwrap();
    let (mut child, pid) = start_shell(&lab, "echo $$; exec sleep 1000");
    child.kill().unwrap();
    child.wait().unwrap();
    wait_for_exit(&lab, &pid);
    // A signal that can be handled is forwarded, and the program's exit code is returned.
    let (mut child, _) = start_shell(
        &lab,
        "trap 'exit 9' TERM; echo $$; while :; do sleep 0.05; done",
    );
    let id = nix::unistd::Pid::from_raw(child.id() as i32);
    nix::sys::signal::kill(id, nix::sys::signal::Signal::SIGTERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(9));
}

#[test]
fn killing_init_kills_only_its_host() {
    if !is_root() {
        return;
    }
    let lab = Lab::up(&spec("init").nodes(2)).unwrap();
    let (mut child, _) = start_shell(&lab, "echo $$; exec sleep 1000");
    let init = nix::unistd::Pid::from_raw(lab.init_process("n1").unwrap());
    nix::sys::signal::kill(init, nix::sys::signal::Signal::SIGKILL).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(137));
    let output = sh(&lab, "n1", "true");
    assert_eq!(output.status.code(), Some(125));
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("host n1 is gone"),
        "{output:?}"
    );
    let status = lab.status().unwrap();
    assert_eq!(
        status.hosts.iter().map(|h| h.alive).collect::<Vec<_>>(),
        [false, true, true]
    );
    output_of(&lab, "n2", "true");
}

#[test]
fn rebooted_host_is_new_and_others_go_on() {
    if !is_root() {
        return;
    }
    let mut lab = Lab::up(&spec("reboot").nodes(2)).unwrap();
    let (mut program, _) = start_shell(&lab, "echo $$; exec sleep 1000");
    let left = "touch /run/holdfast/mine && mkdir /sys/fs/bpf/mine && echo 7 >/proc/sys/net/ipv4/ip_default_ttl";
    output_of(&lab, "n1", left);
    let link = |lab: &Lab| {
        output_of(
            lab,
            "n1",
            "cat /sys/class/net/eth0/address; ip -o -4 addr show eth0",
        )
    };
    let (link_before, other_init) = (link(&lab), lab.init_process("n2").unwrap());
    for _ in 0..2 {
        let (init, processes) = (
            lab.init_process("n1").unwrap(),
            lab.processes("n1").unwrap(),
        );
        lab.reboot("n1").unwrap();
        assert!(!program.wait().unwrap().success());
        assert_ne!(lab.init_process("n1").unwrap(), init);
        for pid in processes {
            assert!(
                !Path::new(&format!("/proc/{pid}")).exists(),
                "process {pid} runs"
            );
        }
        let left = output_of(
            &lab,
            "n1",
            "ls /run/holdfast; test ! -e /sys/fs/bpf/mine || echo mine",
        );
        assert_eq!(left, "");
        let ttl = output_of(&lab, "n1", "cat /proc/sys/net/ipv4/ip_default_ttl");
        assert_eq!(ttl, "64");
        assert_eq!(link(&lab), link_before);
        let (v4, v6) = lab.address("n1").unwrap();
        for address in [v4.into(), v6.into()] {
            assert_echo(&lab, "n2", "n1", address);
            assert_echo(&lab, "c1", "n1", address);
        }
    }
    assert_eq!(lab.init_process("n2").unwrap(), other_init);
    assert!(lab.status().unwrap().hosts.iter().all(|host| host.alive));
    // A reopened lab finds the new host.
    let mut reopened = Lab::open(lab.name()).unwrap();
    assert_eq!(output_of(&reopened, "n1", "hostname"), "n1");
    assert!(matches!(reopened.reboot("n1"), Err(Error::Invalid(_))));
    assert!(matches!(lab.reboot("n9"), Err(Error::NoHost { .. })));
    lab.cut("n1").unwrap();
    assert!(matches!(lab.reboot("n1"), Err(Error::Invalid(_))));
    let (name, group) = (lab.name().to_owned(), lab.cgroup("n1").unwrap());
    lab.down().unwrap();
    assert_removed(&name, &group);
}

#[test]
fn orphans_are_reaped() {
    if !is_root() {
        return;
    }
    let lab = Lab::up(&spec("reap")).unwrap();
    let pid = output_of(
        &lab,
        "n1",
        "sh -c 'echo $$; exec sleep 0.1 >/dev/null 2>&1' & wait $!; sh -c 'sleep 0.2 >/dev/null 2>&1 & echo $!'",
    );
    for pid in pid.lines() {
        wait_for_exit(&lab, pid);
    }
}

#[test]
fn down_removes_everything() {
    if !is_root() {
        return;
    }
    let lab = Lab::up(&spec("down").nodes(2)).unwrap();
    let name = lab.name().to_owned();
    let group = lab.cgroup("n1").unwrap();
    output_of(
        &lab,
        "n1",
        "setsid sleep 1000 >/dev/null 2>&1 </dev/null & echo",
    );
    assert!(group.exists() && !lab.processes("n1").unwrap().is_empty());
    assert!(list().unwrap().contains(&(name.clone(), true)));
    assert!(matches!(Lab::up(&spec("down")), Err(Error::Exists(_))));
    let pids: Vec<_> = lab
        .hosts()
        .iter()
        .flat_map(|host| lab.processes(&host.name).unwrap())
        .collect();
    assert!(pids.len() >= 4, "{pids:?}");
    lab.down().unwrap();
    assert_removed(&name, &group);
    for pid in pids {
        assert!(
            !Path::new(&format!("/proc/{pid}")).exists(),
            "process {pid} is still running"
        );
    }
}

/// Waits until a lab's files are gone for good; a concurrent `prune` may recreate the directory for a moment.
#[track_caller]
fn wait_for_removal(name: &str) {
    let deadline = Instant::now() + Duration::from_secs(60);
    let folder = Path::new("/run/holdfast/lab").join(name);
    while folder.exists() || list().unwrap().iter().any(|(other, _)| other == name) {
        assert!(
            Instant::now() < deadline,
            "exceeded time: parts of lab {name} are left"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[track_caller]
fn assert_removed(name: &str, group: &Path) {
    assert!(!group.exists() && !group.parent().unwrap().exists());
    wait_for_removal(name);
    assert!(matches!(Lab::open(name), Err(Error::NoLab(_))));
}

#[test]
fn several_labs_run_concurrently() {
    if !is_root() {
        return;
    }
    let one = Lab::up(&spec("one")).unwrap();
    let two = Lab::up(&spec("two")).unwrap();
    assert_ne!(one.plan().number, two.plan().number);
    assert_ne!(one.address("n1").unwrap(), two.address("n1").unwrap());
    let reopened = Lab::open(one.name()).unwrap();
    drop(two);
    assert_eq!(output_of(&reopened, "n1", "hostname"), "n1");
    drop(reopened);
    assert_eq!(output_of(&one, "n1", "hostname"), "n1");
}

/// Acts as the owner that is killed, in a separate process: see `killed_owner_leaves_nothing`.
#[test]
#[ignore = "run by another test"]
fn helper_owner_to_be_killed() {
    let Ok(name) = std::env::var("LAB_NAME") else {
        return;
    };
    let mut spec = spec("owner");
    spec.name = name;
    spec.keep = std::env::var("LAB_KEEP").is_ok();
    let lab = Lab::up(&spec).unwrap();
    println!("up {}", lab.init_process("n1").unwrap());
    std::thread::sleep(Duration::from_secs(1000));
}

/// Brings a lab up in another process, which is then killed.
fn start_and_kill_owner(name: &str, keep: bool) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args([
            "--ignored",
            "--exact",
            "helper_owner_to_be_killed",
            "--nocapture",
        ])
        .env("LAB_NAME", name);
    if keep {
        command.env("LAB_KEEP", "1");
    }
    let mut owner = command.stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(owner.stdout.take().unwrap()).lines();
    let init = lines
        .map_while(Result::ok)
        .find_map(|line| line.split_once("up ").map(|(_, pid)| pid.to_owned()));
    owner.kill().unwrap();
    owner.wait().unwrap();
    init.expect("the owner printed no init PID")
}

#[test]
fn killed_owner_leaves_nothing() {
    if !is_root() {
        return;
    }
    let name = spec("killed").name;
    let init = start_and_kill_owner(&name, false);
    // The hosts end by themselves.
    let deadline = Instant::now() + Duration::from_secs(30);
    let running = || {
        std::fs::read_to_string(format!("/proc/{init}/stat"))
            .is_ok_and(|stat| !stat.contains(") Z"))
    };
    while running() {
        assert!(
            Instant::now() < deadline,
            "exceeded time: the host is still running"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    // Another test may prune the lab before this one.
    for turn in 0.. {
        if prune().unwrap().contains(&name) {
            break;
        }
        assert!(turn < 20, "prune() never removes the lab");
        wait_for_removal(&name);
        start_and_kill_owner(&name, false);
    }
    // The same name can be reused at once, pruned or not.
    start_and_kill_owner(&name, false);
    let mut again = spec("killed");
    again.name.clone_from(&name);
    let lab = Lab::up(&again).unwrap();
    output_of(&lab, "n1", "true");
    let group = lab.cgroup("n1").unwrap();
    lab.down().unwrap();
    assert_removed(&name, &group);
}

#[test]
fn kept_lab_outlives_its_owner() {
    if !is_root() {
        return;
    }
    let name = spec("kept").name;
    start_and_kill_owner(&name, true);
    let lab = Lab::open(&name).unwrap();
    assert_eq!(output_of(&lab, "n1", "hostname"), "n1");
    assert!(!prune().unwrap().contains(&name));
    let group = lab.cgroup("n1").unwrap();
    drop(lab);
    assert!(group.exists());
    holdfast_lab::down(&name).unwrap();
    assert_removed(&name, &group);
    assert!(matches!(holdfast_lab::down(&name), Err(Error::NoLab(_))));
}

#[test]
fn failed_start_leaves_nothing() {
    if !is_root() {
        return;
    }
    // The program ends without reporting that it is ready.
    let spec = spec("fails").program("/bin/true");
    let error = Lab::up(&spec).unwrap_err();
    assert!(matches!(error, Error::Program { .. }), "{error}");
    wait_for_removal(&spec.name);
}
