//! Tests of `holdfast pool register` and `watch`.

use std::io::{BufRead, Write};
use std::process::Stdio;

use super::connect::LONG_LINGER_S;
use super::{PoolHost, echo_program, terminate, to_text};

#[test]
fn program_is_registered_while_it_runs() {
    let Some(host) = PoolHost::up("register") else {
        return;
    };
    let echo = echo_program();
    let flags = ["pool", "register", "--handle", "echo", "--policy", "WRR"];
    let program = ["--weight", "3", "--", &echo, "--listen", "0.0.0.0:7007"];
    let registered = host.start_command(&[flags.as_slice(), &program].concat());
    let answer = host.wait_for("the element", || host.resolve_json("echo"));
    assert_eq!(answer["policy"], "WRR");
    let element = &answer["elements"][0];
    assert_eq!(element["policy"]["weight"], 3);
    assert_eq!(element["addresses"][0], "127.0.0.1:7007");
    assert_eq!(element["transport"], "tcp");

    // A session with the element.
    let mut session = host
        .command(&["pool", "connect", "echo", "--linger", LONG_LINGER_S])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a command that runs");
    let mut input = session.stdin.take().expect("its input");
    input.write_all(b"there and back\n").expect("written");
    drop(input);
    let output = session.wait_with_output().expect("its end");
    assert_eq!(to_text(&output.stdout), "there and back\n");
    assert!(output.status.success(), "{}", to_text(&output.stderr));

    // A table of elements, a report of an unreachable element, and an unknown pool.
    let id = element["id"].as_str().expect("a number");
    let output = host.run_command(&["pool", "resolve", "echo", "--report-unreachable", id]);
    assert!(output.status.success(), "{}", to_text(&output.stderr));
    let table = to_text(&output.stdout);
    assert!(
        table.contains("weight 3") && table.contains("tcp 127.0.0.1:7007"),
        "{table}"
    );
    let output = host.run_command(&["pool", "resolve", "none"]);
    assert!(!output.status.success());
    assert!(
        to_text(&output.stderr).contains("there is no pool `none`"),
        "{}",
        to_text(&output.stderr)
    );

    terminate(&registered);
    let output = registered.wait_with_output().expect("its end");
    assert!(
        to_text(&output.stderr).contains("has left the pool"),
        "{}",
        to_text(&output.stderr)
    );
    // The program was killed by the signal that the command passed on.
    assert_eq!(output.status.code(), Some(143));
    assert_eq!(host.element_count("echo"), 0);
}

#[test]
fn program_exit_deregisters_and_sets_exit_code() {
    let Some(host) = PoolHost::up("ends") else {
        return;
    };
    // A program that ends before it listens on any port.
    let flags = ["pool", "register", "--handle", "p", "--"];
    let output = host.run_command(&[flags.as_slice(), &["sh", "-c", "exit 7"]].concat());
    assert_eq!(output.status.code(), Some(7));

    // A program that is killed while it is an element, without a signal to the command.
    let echo = echo_program();
    let program = [&echo, "--listen", "0.0.0.0:7007"];
    let registered = host.start_command(&[flags.as_slice(), &program].concat());
    host.wait_for("the element", || host.resolve_json("p"));
    host.lab.kill_by_name("n1", "echo").expect("killed");
    let output = registered.wait_with_output().expect("its end");
    assert_eq!(
        output.status.code(),
        Some(137),
        "{}",
        to_text(&output.stderr)
    );
    host.wait_for("the element's end", || {
        (host.element_count("p") == 0).then_some(())
    });

    // The command itself is killed and cannot deregister: its daemon ends with it and deregisters the element.
    let mut registered = host.start_command(&[flags.as_slice(), &program].concat());
    host.wait_for("the element", || host.resolve_json("p"));
    host.lab.kill_by_name("n1", "holdfast").expect("killed");
    registered.wait().expect("its end");
    host.wait_for("the element's end", || {
        (host.element_count("p") == 0).then_some(())
    });
}

#[test]
fn load_is_reported_and_mistakes_are_named() {
    let Some(host) = PoolHost::up("load") else {
        return;
    };
    let echo = echo_program();
    let load = host.lab.directory().join("load");
    std::fs::write(&load, "10%").expect("a file");
    let command = format!("cmd:cat {}", load.display());
    let flags = ["pool", "register", "--handle", "busy", "--policy", "LU-DPF"];
    let load_flags = ["--load", &command, "--load-dpf", "0.001", "--every", "0.1"];
    let program = ["--", &echo, "--listen", "0.0.0.0:7007"];
    let registered = host.start_command(&[flags.as_slice(), &load_flags, &program].concat());
    let load_is_shown = |expected: f64| {
        let answer = host.resolve_json("busy")?;
        let policy = &answer["elements"][0]["policy"];
        let load = policy["load"].as_f64()?;
        let is_near = (load - expected).abs() < 0.001;
        (is_near && policy["delay_penalty"].as_f64()? > 0.0009).then_some(())
    };
    host.wait_for("the load", || load_is_shown(0.1));
    std::fs::write(&load, "0.75").expect("a file");
    host.wait_for("the new load", || load_is_shown(0.75));
    terminate(&registered);
    registered.wait_with_output().expect("its end");

    let flags = ["pool", "register", "--handle", "p"];
    for (wrong_flags, error_parts) in [
        (["--policy", "BEST"], "LU-DPF"),
        (["--weight", "3"], "has no weight"),
        (["--load", "2000%"], "is not a load"),
    ] {
        let output = host.run_command(&[flags.as_slice(), &wrong_flags, &program].concat());
        let errors = to_text(&output.stderr);
        assert!(!output.status.success(), "{wrong_flags:?}");
        assert!(errors.contains(error_parts), "{wrong_flags:?}: {errors}");
    }
    let program = ["--transport", "udp", "--", "sleep", "60"];
    let output = host.run_command(&[flags.as_slice(), &program].concat());
    let errors = to_text(&output.stderr);
    assert!(errors.contains("--port"), "{errors}");
}

/// Reads a command's notes until they contain these words, and returns all notes read.
fn read_notes_until(child: &mut std::process::Child, words: &'static str) -> String {
    let mut read_notes = String::new();
    let mut notes = std::io::BufReader::new(child.stderr.as_mut().expect("its notes"));
    while !read_notes.contains(words) {
        let read = notes.read_line(&mut read_notes).expect("a line");
        assert!(
            read > 0,
            "the command ended without the note `{words}`: {read_notes}"
        );
    }
    read_notes
}

#[test]
fn server_runs_on_after_registration_failure() {
    let Some(mut host) = PoolHost::up("stays") else {
        return;
    };
    let echo = echo_program();
    let flags = ["pool", "register", "--handle", "p", "--"];
    let program = [&echo, "--listen", "0.0.0.0:7007"];
    let mut registered = host.start_command(&[flags.as_slice(), &program].concat());
    read_notes_until(&mut registered, "only users on this host");

    // Restarts the registrar with a configuration that refuses every registration.
    host.lab.kill_child("n1", "registrar").expect("killed");
    let config = host.lab.directory().join("closed.toml");
    std::fs::write(&config, "[access]\nregister = [\"192.0.2.1\"]\n").expect("a file");
    let config = config.display().to_string();
    host.start_registrar(&["registrar", "--config", &config]);
    read_notes_until(&mut registered, "trying again");
    assert!(registered.try_wait().expect("its state").is_none());

    // Restarts the registrar with a configuration that accepts all registrations.
    host.lab.kill_child("n1", "registrar").expect("killed");
    host.start_registrar(&["registrar"]);
    host.wait_for("the element", || host.resolve_json("p"));
    terminate(&registered);
    registered.wait().expect("its end");
}

#[test]
fn hanging_load_command_blocks_nothing() {
    let Some(host) = PoolHost::up("hangs") else {
        return;
    };
    // The command has a time limit that a busy machine may exceed, but not in every attempt.
    assert!((0..5).any(|_| death_is_reported_while_load_command_hangs(&host)));
}

fn death_is_reported_while_load_command_hangs(host: &PoolHost) -> bool {
    let echo = echo_program();
    let [hang_file, hanging_file] = ["hang", "hangs"].map(|name| host.lab.directory().join(name));
    let command = format!(
        "cmd:echo 1; test ! -e {} || {{ touch {}; exec sleep 1000; }}",
        hang_file.display(),
        hanging_file.display()
    );
    let flags = ["pool", "register", "--handle", "p", "--policy", "LU"];
    let load = ["--load", &command, "--every", "0.05"];
    let program = ["--", &echo, "--listen", "0.0.0.0:7007"];
    let registered = host.start_command(&[flags.as_slice(), &load, &program].concat());
    host.wait_for("the element", || host.resolve_json("p"));
    std::fs::write(&hang_file, "").expect("a file");
    host.wait_for("the command", || hanging_file.exists().then_some(()));
    host.lab.kill_by_name("n1", "echo").expect("killed");
    let output = registered.wait_with_output().expect("its end");
    assert_eq!(
        output.status.code(),
        Some(137),
        "{}",
        to_text(&output.stderr)
    );
    assert_eq!(host.element_count("p"), 0);
    for file in [&hang_file, &hanging_file] {
        std::fs::remove_file(file).expect("there");
    }
    !to_text(&output.stderr).contains("takes longer")
}

#[test]
fn watch_survives_absence_of_pool() {
    let Some(mut host) = PoolHost::up("watch") else {
        return;
    };
    let mut watch = host.start_command(&["pool", "watch", "p"]);
    let mut watch_output = std::io::BufReader::new(watch.stdout.take().expect("its output"));
    let mut line = || {
        let mut line = String::new();
        watch_output.read_line(&mut line).expect("a line");
        line
    };
    assert_eq!(line(), "pool p: no elements\n");
    host.lab.kill_child("n1", "registrar").expect("killed");
    read_notes_until(&mut watch, "querying again");
    host.start_registrar(&["registrar"]);
    let echo = echo_program();
    let flags = ["pool", "register", "--handle", "p", "--"];
    let registered =
        host.start_command(&[flags.as_slice(), &[&echo, "--listen", "0.0.0.0:7007"]].concat());
    assert_eq!(line(), "\n");
    assert_eq!(line(), "pool p, RR\n");
    terminate(&registered);
    registered.wait_with_output().expect("its end");
    while line() != "pool p: no elements\n" {}
    watch.kill().expect("its end");
    watch.wait().expect("its end");
}
