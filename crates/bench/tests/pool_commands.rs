//! `holdfast pool register`, `resolve` and `connect`, and `holdfast demo pool`, as a user runs them. In labs; needs root.

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

/// Whatever is waited for; the machine may be very busy.
const PATIENCE: Duration = Duration::from_secs(120);

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Labs run one after another. None without root.
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

/// One host with everything, as a newcomer has it.
struct Host {
    lab: PoolLab,
    _alone: MutexGuard<'static, ()>,
}

impl Host {
    fn up(name: &str) -> Option<Host> {
        let alone = alone()?;
        let name = format!("{name}-{}", std::process::id());
        let mut lab = PoolLab::up(&name, 1).expect("a lab");
        let words = ["registrar"].map(str::to_owned);
        let holdfast = find_program("holdfast").expect("holdfast");
        lab.run("n1", "registrar", &holdfast, &words)
            .expect("a registrar");
        let client = lab.control("n1", "registrar").expect("a client");
        let ready = || {
            client
                .run(|client| client.registrar())
                .ok()?
                .ready
                .then_some(())
        };
        lab.until("a registrar that serves", PATIENCE, ready)
            .expect("a registrar");
        Some(Host { lab, _alone: alone })
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

    /// What a resolution brings; none if that fails.
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

    /// How many elements the registrar lists.
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
fn a_program_is_an_element_as_long_as_it_runs() {
    let Some(host) = Host::up("register") else {
        return;
    };
    let echo = echo();
    let flags = ["pool", "register", "--handle", "echo", "--policy", "WRR"];
    let program = ["--weight", "3", "--", &echo, "--listen", "0.0.0.0:7007"];
    let registered = host.start(&[flags.as_slice(), &program].concat());
    let answer = host.until("the element", || host.resolve("echo"));
    assert_eq!(answer["policy"], "WRR");
    let element = &answer["elements"][0];
    assert_eq!(element["policy"]["weight"], 3);
    assert_eq!(element["addresses"][0], "127.0.0.1:7007");
    assert_eq!(element["transport"], "tcp");

    // A session with it.
    let mut session = host
        .command(&["pool", "connect", "echo"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a command that runs");
    let mut input = session.stdin.take().expect("its input");
    input.write_all(b"there and back\n").expect("written");
    drop(input);
    let output = session.wait_with_output().expect("its end");
    assert_eq!(text(&output.stdout), "there and back\n");
    assert!(output.status.success(), "{}", text(&output.stderr));

    // A table, a report, and what is not there.
    let id = element["id"].as_str().expect("a number");
    let output = host.run(&["pool", "resolve", "echo", "--report-unreachable", id]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    assert!(
        table.contains("weight 3") && table.contains("tcp 127.0.0.1:7007"),
        "{table}"
    );
    let output = host.run(&["pool", "resolve", "none"]);
    assert!(!output.status.success());
    assert!(
        text(&output.stderr).contains("there is no pool `none`"),
        "{}",
        text(&output.stderr)
    );

    terminate(&registered);
    let output = registered.wait_with_output().expect("its end");
    assert!(
        text(&output.stderr).contains("has left the pool"),
        "{}",
        text(&output.stderr)
    );
    // Killed by the signal that was passed on.
    assert_eq!(output.status.code(), Some(143));
    assert_eq!(host.elements("echo"), 0);
}

#[test]
fn the_program_s_end_is_the_element_s_and_its_exit_code_the_command_s() {
    let Some(host) = Host::up("ends") else { return };
    // A program that ends before it listens anywhere.
    let flags = ["pool", "register", "--handle", "p", "--"];
    let output = host.run(&[flags.as_slice(), &["sh", "-c", "exit 7"]].concat());
    assert_eq!(output.status.code(), Some(7));

    // One that is killed while it is an element, behind the back of the command.
    let echo = echo();
    let program = [&echo, "--listen", "0.0.0.0:7007"];
    let registered = host.start(&[flags.as_slice(), &program].concat());
    host.until("the element", || host.resolve("p"));
    host.lab.kill("n1", "echo").expect("killed");
    let output = registered.wait_with_output().expect("its end");
    assert_eq!(output.status.code(), Some(137), "{}", text(&output.stderr));
    host.until("the element's end", || {
        (host.elements("p") == 0).then_some(())
    });

    // The command itself is killed, and nobody can say goodbye: the daemon ends with it, and says so.
    let mut registered = host.start(&[flags.as_slice(), &program].concat());
    host.until("the element", || host.resolve("p"));
    host.lab.kill("n1", "holdfast").expect("killed");
    registered.wait().expect("its end");
    host.until("the element's end", || {
        (host.elements("p") == 0).then_some(())
    });
}

#[test]
fn the_load_is_told_and_mistakes_are_named() {
    let Some(host) = Host::up("load") else { return };
    let echo = echo();
    let load = host.lab.directory().join("load");
    std::fs::write(&load, "10%").expect("a file");
    let command = format!("cmd:cat {}", load.display());
    let flags = ["pool", "register", "--handle", "busy", "--policy", "LU-DPF"];
    let more = ["--load", &command, "--load-dpf", "0.001", "--every", "0.1"];
    let program = ["--", &echo, "--listen", "0.0.0.0:7007"];
    let registered = host.start(&[flags.as_slice(), &more, &program].concat());
    let shows = |wanted: f64| {
        let answer = host.resolve("busy")?;
        let policy = &answer["elements"][0]["policy"];
        let load = policy["load"].as_f64()?;
        let near = (load - wanted).abs() < 0.001;
        (near && policy["delay_penalty"].as_f64()? > 0.0009).then_some(())
    };
    host.until("the load", || shows(0.1));
    std::fs::write(&load, "0.75").expect("a file");
    host.until("the new load", || shows(0.75));
    terminate(&registered);
    registered.wait_with_output().expect("its end");

    let flags = ["pool", "register", "--handle", "p"];
    for (wrong, words) in [
        (["--policy", "BEST"], "LU-DPF"),
        (["--weight", "3"], "has no weight"),
        (["--load", "2000%"], "no load"),
    ] {
        let output = host.run(&[flags.as_slice(), &wrong, &program].concat());
        let said = text(&output.stderr);
        assert!(!output.status.success(), "{wrong:?}");
        assert!(said.contains(words), "{wrong:?}: {said}");
    }
    let program = ["--transport", "udp", "--", "sleep", "60"];
    let output = host.run(&[flags.as_slice(), &program].concat());
    let said = text(&output.stderr);
    assert!(said.contains("--port"), "{said}");
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
    // The one that it is with.
    let index = usize::from(at.contains(":7008"));
    let ended = elements[index].take().expect("an element");
    terminate(&ended);
    ended.wait_with_output().expect("its end");
    assert!(line(&mut notes).contains("is lost"));
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
