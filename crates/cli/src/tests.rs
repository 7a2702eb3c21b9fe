//! Tests of help and error messages.

use clap::{CommandFactory, Parser};

use crate::{CommandLine, ExitResult, run};

/// Returns clap's error text.
fn clap_error(words: &str) -> String {
    let error = CommandLine::try_parse_from(words.split(' ')).expect_err(words);
    error.to_string()
}

#[test]
fn clap_definitions_are_consistent() {
    CommandLine::command().debug_assert();
}

#[test]
fn every_command_has_help_with_an_example() {
    let mut root = CommandLine::command();
    root.build();
    let mut stack: Vec<_> = root.get_subcommands().cloned().collect();
    while let Some(command) = stack.pop() {
        let name = command.get_name().to_owned();
        assert!(
            name == "help" || command.get_about().is_some(),
            "{name} has no description"
        );
        for argument in command.get_arguments() {
            assert!(
                argument.get_help().is_some(),
                "{name} {} has no help",
                argument.get_id()
            );
        }
        let leaf = command.get_subcommands().next().is_none();
        let exempt = [
            "status",
            "list",
            "show",
            "cancel",
            "handoff",
            "check",
            "migrate",
            "clone",
            "proxy",
            "token",
            "leave",
            "remove",
            "promote",
            "takeover",
            "demo",
            "node",
            "registrar",
            "repro",
            "watch",
            "peers",
            "completions",
            "man",
        ];
        if leaf
            && exempt.contains(&name.as_str())
            && command
                .get_arguments()
                .any(|each| each.get_id() == "socket")
        {
            let after = command
                .get_after_help()
                .map(ToString::to_string)
                .unwrap_or_default();
            assert!(after.contains("Example"), "{name} shows no example");
        }
        stack.extend(command.get_subcommands().cloned());
    }
}

#[test]
fn top_level_help_is_as_expected() {
    let help = CommandLine::command().render_help().to_string();
    let lines: Vec<&str> = help.lines().collect();
    assert_eq!(
        lines[0],
        "A group of servers that answers as one, and moves connections between them while they are in use"
    );
    assert!(help.contains("Usage: holdfast <COMMAND>"), "{help}");
    for command in [
        "demo",
        "lab",
        "ca",
        "group",
        "node",
        "registrar",
        "pool",
        "status",
        "flow",
        "handoff",
        "check",
        "migrate",
        "migrations",
        "clone",
        "drain",
        "undrain",
        "balance",
        "top",
        "proxy",
        "bench",
        "repro",
    ] {
        assert!(
            help.contains(&format!("\n  {command} ")),
            "{command} is missing:\n{help}"
        );
    }
    assert!(
        help.ends_with("3 some flows stayed where they were.\n"),
        "{help}"
    );
}

#[test]
fn invalid_arguments_are_named() {
    let flow = "tcp:10.0.0.1:80-10.0.1.2:4242";
    for (words, names) in [
        ("holdfast handoff --to n2", "<FLOW>"),
        (&format!("holdfast handoff {flow}"), "--to <NODE>"),
        (
            &format!("holdfast handoff {flow} --to n2 --all"),
            "cannot be used with",
        ),
        (
            &format!("holdfast handoff {flow} --to n2 --pool files"),
            "cannot be used with",
        ),
        (
            "holdfast handoff 10.0.0.1:80 --to n2",
            "a flow begins with `tcp:` or `udp:`, for example tcp:10.0.0.1:80",
        ),
        (
            "holdfast flow show tcp:1.2.3.4:1-[::1]:2",
            "different families",
        ),
        (
            "holdfast flw list",
            "tip: a similar subcommand exists: 'flow'",
        ),
    ] {
        let error_text = clap_error(words);
        assert!(error_text.contains(names), "{words}: {error_text}");
    }
}

#[test]
fn missing_daemon_error_has_a_remedy() {
    let run_error = |words: &str| {
        let line = CommandLine::try_parse_from(words.split(' ')).unwrap();
        run(line).err().expect("no daemon").to_string()
    };
    let flow = "tcp:10.0.0.1:80-10.0.1.2:4242";
    for command in [
        "status",
        "flow list",
        "migrations list",
        "migrations cancel 3",
        &format!("flow show {flow}"),
        &format!("handoff {flow} --to n2"),
    ] {
        assert_eq!(
            run_error(&format!(
                "holdfast {command} --socket /nonexistent/control.sock"
            )),
            "no daemon runs here: there is no /nonexistent/control.sock\n\
             Start one with `holdfast node --config FILE`, or name its socket with --socket PATH."
        );
    }
    let error_text = run_error("holdfast pool show echo --socket /nonexistent/registrar.sock");
    assert!(
        error_text.contains("Start one with `holdfast registrar`"),
        "{error_text}"
    );
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control.sock");
    // A socket without a listener, as left by a killed daemon.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let error_text = run_error(&format!("holdfast status --socket {}", path.display()));
    assert!(
        error_text.starts_with("the daemon has ended"),
        "{error_text}"
    );
}

#[test]
fn completions_and_manual_pages_are_generated() {
    let directory = tempfile::tempdir().unwrap();
    let line = CommandLine::try_parse_from(["holdfast", "man", directory.path().to_str().unwrap()])
        .unwrap();
    run(line).unwrap();
    let page = std::fs::read_to_string(directory.path().join("holdfast-handoff.1")).unwrap();
    assert!(
        page.contains("--drain") || page.contains("\\-\\-drain"),
        "{page}"
    );
}

#[test]
fn each_simulation_kind_reports_its_result() {
    let ending = |words: &str| {
        let line = CommandLine::try_parse_from(words.split(' ')).unwrap();
        run(line)
    };
    for words in [
        "holdfast sim run handoff --seeds 20",
        "holdfast sim run migration --seeds 20 --json",
        "holdfast sim run handoff --seed 3 --trace",
        "holdfast sim seeds --count 50 handoff",
        "holdfast sim seeds --count 50 migration",
        "holdfast sim run membership --seeds 5",
        "holdfast sim seeds --count 2",
    ] {
        assert!(matches!(ending(words), Ok(ExitResult::Success)), "{words}");
    }
    for words in [
        "holdfast sim seeds --count 20 --bug freeze-keeps-sending handoff",
        "holdfast sim seeds --count 20 --bug freeze-keeps-running migration",
        "holdfast sim seeds --count 5 --bug no-timers membership",
        "holdfast sim seeds --count 2 --bug no-user-timers",
    ] {
        assert!(matches!(ending(words), Ok(ExitResult::Failed)), "{words}");
    }
    for (words, names) in [
        ("holdfast sim seeds --bug none handoff", "asks-once"),
        ("holdfast sim seeds lans", "lists the events"),
        ("holdfast sim run lans --trace", "pools have no trace"),
        ("holdfast sim run nothing.toml", "holdfast sim list"),
    ] {
        let error = ending(words).err().expect("the command fails");
        assert!(format!("{error:#}").contains(names), "{words}: {error:#}");
    }
}

#[test]
fn error_of_the_system_is_printed_once() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing");
    for command in ["issue n1", "revoke n1"] {
        let words = format!("holdfast ca --dir {} {command}", missing.display());
        let line = CommandLine::try_parse_from(words.split(' ')).unwrap();
        let error = run(line).err().expect("there is no authority");
        let printed = format!("{error:#}");
        let texts = printed.matches("No such file or directory").count();
        assert_eq!(texts, 1, "{printed}");
    }
}
