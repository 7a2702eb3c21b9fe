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
use holdfast_bench::cluster::find_program;
use holdfast_bench::demo::pool::PoolDemoSpec;
use holdfast_bench::pools::PoolLab;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

/// Longest wait for any condition, with a margin for a heavily loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Returns a guard that makes labs run one after another. None without root.
fn alone() -> Option<MutexGuard<'static, ()>> {
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
struct Host {
    lab: PoolLab,
    _alone: MutexGuard<'static, ()>,
}

impl Host {
    fn up(name: &str) -> Option<Host> {
        let alone = alone()?;
        let name = format!("{name}-{}", std::process::id());
        let lab = PoolLab::up(&name, 1).expect("a lab");
        let mut host = Host { lab, _alone: alone };
        host.registrar(&["registrar"]);
        Some(host)
    }

    fn registrar(&mut self, words: &[&str]) {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        let holdfast = find_program("holdfast").expect("holdfast");
        self.lab
            .run("n1", "registrar", &holdfast, &words)
            .expect("a registrar");
        let client = self.lab.control("n1", "registrar").expect("a client");
        let ready = || {
            client
                .run(|client| client.registrar())
                .ok()?
                .ready
                .then_some(())
        };
        self.until("a registrar that serves", ready);
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = self.lab.lab().command("n1").expect("a host");
        command
            .arg(find_program("holdfast").expect("holdfast"))
            .args(words);
        command
    }

    fn run(&self, words: &[&str]) -> Output {
        let output = self.command(words).output();
        output.expect("a command that runs")
    }

    fn start(&self, words: &[&str]) -> std::process::Child {
        let mut command = self.command(words);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("a command that runs")
    }

    /// Returns the result of a resolution; none if the command fails.
    fn resolve(&self, handle: &str) -> Option<Value> {
        let output = self.run(&["pool", "resolve", handle, "--json"]);
        output
            .status
            .success()
            .then(|| serde_json::from_slice(&output.stdout).expect("JSON"))
    }

    fn until<T>(&self, what: &str, look: impl FnMut() -> Option<T>) -> T {
        self.lab.until(what, PATIENCE, look).expect(what)
    }

    /// Returns the number of elements that the registrar lists.
    fn elements(&self, handle: &str) -> usize {
        let client = self.lab.control("n1", "registrar").expect("a client");
        let query = PoolQuery::default();
        let list = client.run(|client| client.pools(&query));
        let pools = list.expect("a registrar that answers").pools;
        let pool = pools.iter().find(|pool| pool.handle == handle);
        pool.map_or(0, |pool| pool.elements as usize)
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn terminate(child: &std::process::Child) {
    let id = Pid::from_raw(child.id().cast_signed());
    kill(id, Signal::SIGTERM).expect("a signal");
}

fn echo() -> String {
    let program = find_program("echo").expect("the example");
    program.display().to_string()
}

#[test]
fn a_terminal_session_goes_on_where_an_element_ends() {
    let Some(host) = Host::up("connect") else {
        return;
    };
    let echo = echo();
    let start = |port: u16| {
        let at = format!("0.0.0.0:{port}");
        let flags = ["pool", "register", "--handle", "echo", "--"];
        host.start(&[flags.as_slice(), &[&echo, "--listen", &at]].concat())
    };
    let mut elements = [start(7007), start(7008)].map(Some);
    host.until("both elements", || {
        (host.elements("echo") == 2).then_some(())
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
    let line = |source: &mut dyn std::io::BufRead| {
        let mut line = String::new();
        source.read_line(&mut line).expect("a line");
        line
    };
    let at = line(&mut notes);
    input.write_all(b"one\n").expect("written");
    assert_eq!(line(&mut output), "one\n");
    // The element that serves the session.
    let index = usize::from(at.contains(":7008"));
    let ended = elements[index].take().expect("an element");
    terminate(&ended);
    ended.wait_with_output().expect("its end");
    // The kernel closes a killed program's connections in an orderly way, so the end is seen at once.
    let ended = "has ended the session, going on at another";
    assert!(line(&mut notes).contains(ended));
    let next = line(&mut notes);
    let other = if index == 0 { ":7008" } else { ":7007" };
    assert!(next.contains(other), "{next}");
    input.write_all(b"two\n").expect("written");
    assert_eq!(line(&mut output), "two\n");
    drop(input);
    assert!(session.wait().expect("its end").success());
    for element in elements.into_iter().flatten() {
        terminate(&element);
        element.wait_with_output().expect("its end");
    }
}

#[test]
fn the_demonstration_is_as_promised() {
    let Some(_alone) = alone() else { return };
    let spec = PoolDemoSpec {
        name: format!("demopool-{}", std::process::id()),
        calm: Duration::from_secs(1),
        ..PoolDemoSpec::default()
    };
    let started = Instant::now();
    let said = Mutex::new(Vec::new());
    let watch = |event: &holdfast_bench::demo::pool::PoolEvent| {
        let words = format!("{:?} {event:?}", started.elapsed());
        said.lock().expect("events").push(words);
    };
    let report = holdfast_bench::demo::pool::run(&spec, &watch).expect("a result");
    assert!(
        report.passed,
        "{}\n{}",
        report.text(),
        said.lock().expect("events").join("\n")
    );
}
