//! Tests of `holdfast pool register` and `watch`.

use std::io::{BufRead, Write};
use std::process::Stdio;

use super::connect::LONG;
use super::{Host, echo, terminate, text};

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

    // A session with the element.
    let mut session = host
        .command(&["pool", "connect", "echo", "--linger", LONG])
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

    // A table of elements, a report of an unreachable element, and an unknown pool.
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
    // The program was killed by the signal that the command passed on.
    assert_eq!(output.status.code(), Some(143));
    assert_eq!(host.elements("echo"), 0);
}

#[test]
fn the_program_s_end_is_the_element_s_and_its_exit_code_the_command_s() {
    let Some(host) = Host::up("ends") else { return };
    // A program that ends before it listens on any port.
    let flags = ["pool", "register", "--handle", "p", "--"];
    let output = host.run(&[flags.as_slice(), &["sh", "-c", "exit 7"]].concat());
    assert_eq!(output.status.code(), Some(7));

    // A program that is killed while it is an element, without a signal to the command.
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

    // The command itself is killed and cannot deregister: its daemon ends with it and deregisters the element.
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

/// Reads a command's notes until they contain these words, and returns all notes read.
fn says(child: &mut std::process::Child, words: &'static str) -> String {
    let mut said = String::new();
    let mut notes = std::io::BufReader::new(child.stderr.as_mut().expect("its notes"));
    while !said.contains(words) {
        let read = notes.read_line(&mut said).expect("a line");
        assert!(read > 0, "it has ended without `{words}`: {said}");
    }
    said
}

#[test]
fn a_server_runs_on_whatever_becomes_of_its_registration() {
    let Some(mut host) = Host::up("stays") else {
        return;
    };
    let echo = echo();
    let flags = ["pool", "register", "--handle", "p", "--"];
    let program = [&echo, "--listen", "0.0.0.0:7007"];
    let mut registered = host.start(&[flags.as_slice(), &program].concat());
    says(&mut registered, "only users on this host");

    // Restarts the registrar with a configuration that refuses every registration.
    host.lab.end("n1", "registrar").expect("killed");
    let config = host.lab.directory().join("closed.toml");
    std::fs::write(&config, "[access]\nregister = [\"192.0.2.1\"]\n").expect("a file");
    let config = config.display().to_string();
    host.registrar(&["registrar", "--config", &config]);
    says(&mut registered, "trying again");
    assert!(registered.try_wait().expect("its state").is_none());

    // Restarts the registrar with a configuration that accepts all registrations.
    host.lab.end("n1", "registrar").expect("killed");
    host.registrar(&["registrar"]);
    host.until("the element", || host.resolve("p"));
    terminate(&registered);
    registered.wait().expect("its end");
}

#[test]
fn a_command_for_the_load_that_hangs_keeps_nothing_waiting() {
    let Some(host) = Host::up("hangs") else {
        return;
    };
    // The command has a time limit that a busy machine may exceed, but not in every attempt.
    assert!((0..5).any(|_| death_is_told_while_the_command_hangs(&host)));
}

fn death_is_told_while_the_command_hangs(host: &Host) -> bool {
    let echo = echo();
    let [hang, hangs] = ["hang", "hangs"].map(|name| host.lab.directory().join(name));
    let command = format!(
        "cmd:echo 1; test ! -e {} || {{ touch {}; exec sleep 1000; }}",
        hang.display(),
        hangs.display()
    );
    let flags = ["pool", "register", "--handle", "p", "--policy", "LU"];
    let load = ["--load", &command, "--every", "0.05"];
    let program = ["--", &echo, "--listen", "0.0.0.0:7007"];
    let registered = host.start(&[flags.as_slice(), &load, &program].concat());
    host.until("the element", || host.resolve("p"));
    std::fs::write(&hang, "").expect("a file");
    host.until("the command", || hangs.exists().then_some(()));
    host.lab.kill("n1", "echo").expect("killed");
    let output = registered.wait_with_output().expect("its end");
    assert_eq!(output.status.code(), Some(137), "{}", text(&output.stderr));
    assert_eq!(host.elements("p"), 0);
    for file in [&hang, &hangs] {
        std::fs::remove_file(file).expect("there");
    }
    !text(&output.stderr).contains("takes longer")
}

#[test]
fn a_pool_is_watched_through_its_absence() {
    let Some(mut host) = Host::up("watch") else {
        return;
    };
    let mut watch = host.start(&["pool", "watch", "p"]);
    let mut shown = std::io::BufReader::new(watch.stdout.take().expect("its output"));
    let mut line = || {
        let mut line = String::new();
        shown.read_line(&mut line).expect("a line");
        line
    };
    assert_eq!(line(), "pool p: no elements\n");
    host.lab.end("n1", "registrar").expect("killed");
    says(&mut watch, "looking again");
    host.registrar(&["registrar"]);
    let echo = echo();
    let flags = ["pool", "register", "--handle", "p", "--"];
    let registered = host.start(&[flags.as_slice(), &[&echo, "--listen", "0.0.0.0:7007"]].concat());
    assert_eq!(line(), "\n");
    assert_eq!(line(), "pool p, RR\n");
    terminate(&registered);
    registered.wait_with_output().expect("its end");
    while line() != "pool p: no elements\n" {}
    watch.kill().expect("its end");
    watch.wait().expect("its end");
}
