//! Tests of `holdfast pool register`, `resolve` and `connect`, and of `holdfast demo pool`, as a user runs them. In
//! labs; need root.

mod connect;
mod prequal;
mod register;
mod transports;

use std::io::Write;
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use holdfast_api::control::PoolQuery;
use holdfast_bench::demo::pool::PoolDemoSpec;
use holdfast_testbed::cluster::find_program;
use holdfast_testbed::process_lab::ProcessLab;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

/// Longest wait for any condition, with a margin for a heavily loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Returns a guard that makes labs run one after another. None without root.
fn lock_lab() -> Option<MutexGuard<'static, ()>> {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: a lab needs root");
        return None;
    }
    Some(
        ONE_AT_A_TIME
            .lock()
            .unwrap_or_else(|held| held.into_inner()),
    )
}

/// One host with registrar, elements and users, as in a new user's first trial.
struct PoolHost {
    lab: ProcessLab,
    _lab_lock: MutexGuard<'static, ()>,
}

impl PoolHost {
    fn up(name: &str) -> Option<PoolHost> {
        let lab_lock = lock_lab()?;
        let name = format!("{name}-{}", std::process::id());
        let lab = ProcessLab::up(&name, 1).expect("a lab");
        let mut host = PoolHost {
            lab,
            _lab_lock: lab_lock,
        };
        host.start_registrar(&["registrar"]);
        Some(host)
    }

    fn start_registrar(&mut self, words: &[&str]) {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        let holdfast = find_program("holdfast").expect("holdfast");
        self.lab
            .run("n1", "registrar", &holdfast, &words)
            .expect("a registrar");
        let client = self
            .lab
            .control_client("n1", "registrar")
            .expect("a client");
        let ready = || {
            client
                .run(|client| client.registrar())
                .ok()?
                .ready
                .then_some(())
        };
        self.wait_for("a registrar that serves", ready);
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = self.lab.lab().command("n1").expect("a host");
        command
            .arg(find_program("holdfast").expect("holdfast"))
            .args(words);
        command
    }

    fn run_command(&self, words: &[&str]) -> Output {
        let output = self.command(words).output();
        output.expect("a command that runs")
    }

    fn start_command(&self, words: &[&str]) -> std::process::Child {
        let mut command = self.command(words);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("a command that runs")
    }

    /// Returns the result of a resolution; none if the command fails.
    fn resolve_json(&self, handle: &str) -> Option<Value> {
        let output = self.run_command(&["pool", "resolve", handle, "--json"]);
        output
            .status
            .success()
            .then(|| serde_json::from_slice(&output.stdout).expect("JSON"))
    }

    fn wait_for<T>(&self, what: &str, poll: impl FnMut() -> Option<T>) -> T {
        self.lab.wait_for(what, PATIENCE, poll).expect(what)
    }

    /// Returns the number of elements that the registrar lists.
    fn element_count(&self, handle: &str) -> usize {
        let client = self
            .lab
            .control_client("n1", "registrar")
            .expect("a client");
        let query = PoolQuery::default();
        let list = client.run(|client| client.pools(&query));
        let pools = list.expect("a registrar that answers").pools;
        let pool = pools.iter().find(|pool| pool.handle == handle);
        pool.map_or(0, |pool| pool.elements as usize)
    }
}

fn to_text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn terminate(child: &std::process::Child) {
    let id = Pid::from_raw(child.id().cast_signed());
    kill(id, Signal::SIGTERM).expect("a signal");
}

fn echo_program() -> String {
    let program = find_program("echo").expect("the example");
    program.display().to_string()
}

#[test]
fn terminal_session_continues_at_next_element() {
    let Some(host) = PoolHost::up("connect") else {
        return;
    };
    let echo = echo_program();
    let register_echo = |port: u16| {
        let listen_address = format!("0.0.0.0:{port}");
        let flags = ["pool", "register", "--handle", "echo", "--"];
        host.start_command(&[flags.as_slice(), &[&echo, "--listen", &listen_address]].concat())
    };
    let mut elements = [register_echo(7007), register_echo(7008)].map(Some);
    host.wait_for("both elements", || {
        (host.element_count("echo") == 2).then_some(())
    });
    let mut session = host
        .command(&["pool", "connect", "echo"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a command that runs");
    let mut input = session.stdin.take().expect("its input");
    let mut output = std::io::BufReader::new(session.stdout.take().expect("its output"));
    let mut notes = std::io::BufReader::new(session.stderr.take().expect("its notes"));
    let read_line = |source: &mut dyn std::io::BufRead| {
        let mut line = String::new();
        source.read_line(&mut line).expect("a line");
        line
    };
    let connected_note = read_line(&mut notes);
    input.write_all(b"one\n").expect("written");
    assert_eq!(read_line(&mut output), "one\n");
    // The element that serves the session.
    let element_index = usize::from(connected_note.contains(":7008"));
    let ended = elements[element_index].take().expect("an element");
    terminate(&ended);
    ended.wait_with_output().expect("its end");
    // The kernel closes a killed program's connections in an orderly way, so the end is seen at once.
    let expected_note = "has ended the session, continuing at another";
    assert!(read_line(&mut notes).contains(expected_note));
    let next = read_line(&mut notes);
    let other = if element_index == 0 { ":7008" } else { ":7007" };
    assert!(next.contains(other), "{next}");
    input.write_all(b"two\n").expect("written");
    assert_eq!(read_line(&mut output), "two\n");
    drop(input);
    assert!(session.wait().expect("its end").success());
    for element in elements.into_iter().flatten() {
        terminate(&element);
        element.wait_with_output().expect("its end");
    }
}

#[test]
fn pool_demo_keeps_promises() {
    let Some(_alone) = lock_lab() else { return };
    let spec = PoolDemoSpec {
        name: format!("demopool-{}", std::process::id()),
        calm: Duration::from_secs(1),
        ..PoolDemoSpec::default()
    };
    let started = Instant::now();
    let events = Mutex::new(Vec::new());
    let record_event = |event: &holdfast_bench::demo::pool::PoolEvent| {
        let words = format!("{:?} {event:?}", started.elapsed());
        events.lock().expect("events").push(words);
    };
    let report = holdfast_bench::demo::pool::run(&spec, &record_event).expect("a result");
    assert!(
        report.passed,
        "{}\n{}",
        report.text(),
        events.lock().expect("events").join("\n")
    );
}
