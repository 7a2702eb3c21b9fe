//! The test run: `cargo nextest`, then a second pass for tests that exceeded their time.
//!
//! A test that fails for any other reason fails the run at once: a wrong byte, a reset or a second owner is no less
//! wrong because it is rare. A test that only exceeded its time runs again, alone. If it then passes, the run
//! reports it as flaky.

mod failure;
mod report;

use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail, ensure};

use self::failure::TestFailure;
use self::report::{TestCase, TestReport};

/// Number of flaky tests that a run may have and still pass.
const FLAKY_MAX: usize = 3;
/// Number of tests in the list of the slowest.
const SLOWEST_LISTED: usize = 20;
/// nextest's report file, relative to the checkout (`store.dir` and `junit.path` in `.config/nextest.toml`).
const REPORT_PATH: &str = "target/nextest/default/junit.xml";

/// Result of both passes.
#[derive(Debug, Default)]
struct TestRunOutcome {
    passed: usize,
    failed: Vec<String>,
    flaky: Vec<String>,
    skipped: Vec<String>,
}

/// Runs the tests that `selection` names (`--workspace`, `--test NAME`, `-E FILTER`, …).
///
/// # Errors
///
/// When nextest cannot build or list the tests, or writes no report.
pub fn run(root: &Path, selection: &[&str]) -> Result<ExitCode> {
    let first = run_nextest(root, selection, &[])?;
    let selection = &without_filters(selection)[..];
    print_slowest(&first);
    let outcome = classify_and_rerun(first, |names| {
        let filter = names
            .iter()
            .map(|test| format!("(binary_id(={}) & test(={}))", test.binary, test.name))
            .collect::<Vec<_>>()
            .join(" | ");
        println!(
            "\nsecond pass, one test at a time: {} exceeded their time",
            names.len()
        );
        run_nextest(root, selection, &["--test-threads", "1", "-E", &filter])
    })?;
    Ok(print_outcome(&outcome))
}

/// Runs nextest once and reads its report.
fn run_nextest(root: &Path, selection: &[&str], extra_arguments: &[&str]) -> Result<TestReport> {
    let report = root.join(REPORT_PATH);
    if report.exists() {
        std::fs::remove_file(&report).with_context(|| format!("remove {}", report.display()))?;
    }
    let mut cargo = Command::new("cargo");
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(is_set_by_cargo) {
            cargo.env_remove(name);
        }
    }
    let status = cargo
        .args(["nextest", "run", "--locked", "--no-fail-fast"])
        .args(selection)
        .args(extra_arguments)
        .current_dir(root)
        .status()
        .context("run cargo nextest; `./x test` installs it")?;
    // Exit status 100: tests failed; 4: no tests matched (nextest's `NextestExitCode`).
    ensure!(
        status.success() || status.code() == Some(100),
        "cargo nextest: {status}"
    );
    let text = std::fs::read_to_string(&report)
        .with_context(|| format!("read nextest's report {}", report.display()))?;
    TestReport::parse(&text)
}

/// Returns the selection without its filters (`-E FILTER`): nextest runs what any of several filters matches.
fn without_filters<'a>(selection: &[&'a str]) -> Vec<&'a str> {
    let mut words = selection.iter();
    let mut kept = Vec::new();
    while let Some(word) = words.next() {
        match *word {
            "-E" => drop(words.next()),
            other => kept.push(other),
        }
    }
    kept
}

/// Returns true if Cargo has set a variable for this program. Build scripts read some of these: if the values differ
/// from a manually started Cargo's, the scripts and all packages that depend on them are rebuilt, and rebuilt again by
/// the next manual build.
fn is_set_by_cargo(variable: &str) -> bool {
    const PREFIXES: [&str; 4] = [
        "CARGO_PKG_",
        "CARGO_MANIFEST_",
        "CARGO_CRATE_",
        "CARGO_BIN_",
    ];
    const NAMES: [&str; 3] = ["CARGO", "CARGO_PRIMARY_PACKAGE", "OUT_DIR"];
    let begins = PREFIXES.iter().any(|one| variable.starts_with(one));
    begins || NAMES.contains(&variable)
}

/// Sorts the first pass's failures, and repeats the tests that only exceeded their time.
fn classify_and_rerun(
    first: TestReport,
    run_again: impl FnOnce(&[TestCase]) -> Result<TestReport>,
) -> Result<TestRunOutcome> {
    let mut outcome = TestRunOutcome::default();
    let mut timed_out = Vec::new();
    for test in first.tests {
        match (&test.failure, &test.skipped) {
            (None, None) => outcome.passed += 1,
            (None, Some(reason)) => outcome.skipped.push(format!("{}: {reason}", test.title())),
            (Some(failure), _) if failure.is_exceeded_time() => timed_out.push(test),
            (Some(failure), _) => outcome.failed.push(with_reason(&test, failure)),
        }
    }
    if timed_out.is_empty() {
        return Ok(outcome);
    }
    let again = run_again(&timed_out)?;
    for test in timed_out {
        let second = again
            .tests
            .iter()
            .find(|found| found.binary == test.binary && found.name == test.name);
        let Some(second) = second else {
            bail!("{} did not run in the second pass", test.title());
        };
        if let Some(failure) = &second.failure {
            outcome.failed.push(with_reason(&test, failure));
        } else {
            println!("\nfirst output of {}:", test.title());
            let output = test.failure.as_ref().map_or("", TestFailure::output);
            println!("{}", indent(output));
            outcome.passed += 1;
            outcome.flaky.push(test.title());
        }
    }
    Ok(outcome)
}

/// Indents each line, so that `./x` does not count a `test result:` in it as this run's.
fn indent(output: &str) -> String {
    let lines = output.lines().map(|line| format!("    {line}\n"));
    lines.collect()
}

fn with_reason(test: &TestCase, failure: &TestFailure) -> String {
    format!("{}: {}", test.title(), failure.reason())
}

fn print_slowest(report: &TestReport) {
    let mut tests: Vec<&TestCase> = report.tests.iter().collect();
    tests.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    println!("\nslowest tests:");
    for test in tests.iter().take(SLOWEST_LISTED) {
        println!("{:8.1} s  {}", test.seconds, test.title());
    }
}

/// Prints the lines that `./x` collects: `failed test: NAME: REASON`, `flaky: NAME`, `skipped test: NAME: REASON`, and
/// cargo's `test result:`.
fn print_outcome(outcome: &TestRunOutcome) -> ExitCode {
    let too_many = outcome.flaky.len() > FLAKY_MAX;
    println!();
    for name in &outcome.failed {
        println!("failed test: {name}");
    }
    for test in &outcome.skipped {
        println!("skipped test: {test}");
    }
    for name in &outcome.flaky {
        println!("flaky: {name} exceeded its time and passed alone");
    }
    if too_many {
        println!(
            "{} tests are flaky, a run may have {FLAKY_MAX}",
            outcome.flaky.len()
        );
    }
    let is_success = outcome.failed.is_empty() && !too_many;
    println!(
        "test result: {}. {} passed; {} failed; {} ignored; 0 measured; 0 filtered out",
        if is_success { "ok" } else { "FAILED" },
        outcome.passed,
        outcome.failed.len(),
        outcome.skipped.len()
    );
    if is_success {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test(name: &str, failure: Option<&str>) -> TestCase {
        TestCase {
            binary: "holdfast-bench::moves".into(),
            name: name.into(),
            seconds: 1.0,
            failure: failure.map(|output| TestFailure::new("test failure", output)),
            skipped: None,
        }
    }

    const TIMEOUT_OUTPUT: &str = "thread 'a' (7) panicked at a.rs:1:1:\nexceeded time: no answer\n";
    const WRONG_OUTPUT: &str = "thread 'a' (7) panicked at a.rs:1:1:\n127 wrong bytes\n";

    #[test]
    fn output_of_flaky_test_has_no_line_that_counts() {
        let output = indent("running 1 test\ntest result: FAILED. 0 passed; 1 failed\n");
        assert!(
            output.lines().all(|line| line.starts_with("    ")),
            "{output}"
        );
    }

    #[test]
    fn user_variables_stay() {
        for set in ["CARGO", "CARGO_PKG_NAME", "CARGO_MANIFEST_DIR", "OUT_DIR"] {
            assert!(is_set_by_cargo(set), "{set}");
        }
        for own in [
            "CARGO_TARGET_DIR",
            "CARGO_HOME",
            "CARGO_PROFILE_DEV_DEBUG",
            "PATH",
        ] {
            assert!(!is_set_by_cargo(own), "{own}");
        }
    }

    #[test]
    fn timed_out_test_that_passes_alone_is_flaky() {
        let first = TestReport {
            tests: vec![test("a", Some(TIMEOUT_OUTPUT)), test("b", None)],
        };
        let outcome = classify_and_rerun(first, |late| {
            assert_eq!(late.len(), 1);
            Ok(TestReport {
                tests: vec![test("a", None)],
            })
        })
        .unwrap();
        assert_eq!(outcome.passed, 2);
        assert_eq!(outcome.flaky, ["holdfast-bench::moves a"]);
        assert!(outcome.failed.is_empty());
    }

    #[test]
    fn wrong_result_is_not_run_again() {
        let first = TestReport {
            tests: vec![test("a", Some(WRONG_OUTPUT))],
        };
        let outcome = classify_and_rerun(first, |_| panic!("no second pass")).unwrap();
        assert_eq!(outcome.failed.len(), 1);
        assert!(outcome.failed[0].starts_with("holdfast-bench::moves a: "));
        assert!(outcome.failed[0].ends_with("127 wrong bytes"));
    }

    #[test]
    fn test_that_times_out_twice_fails() {
        let first = TestReport {
            tests: vec![test("a", Some(TIMEOUT_OUTPUT))],
        };
        let second = TestReport {
            tests: vec![test("a", Some(TIMEOUT_OUTPUT))],
        };
        let outcome = classify_and_rerun(first, |_| Ok(second)).unwrap();
        assert_eq!(outcome.failed.len(), 1);
        assert!(outcome.flaky.is_empty());
    }

    #[test]
    fn test_missing_from_the_second_pass_is_an_error() {
        let first = TestReport {
            tests: vec![test("a", Some(TIMEOUT_OUTPUT))],
        };
        assert!(classify_and_rerun(first, |_| Ok(TestReport::default())).is_err());
    }

    #[test]
    fn more_than_three_flaky_tests_fail_the_run() {
        let mut outcome = TestRunOutcome {
            flaky: vec!["x".into(); FLAKY_MAX],
            ..TestRunOutcome::default()
        };
        assert_eq!(print_outcome(&outcome), ExitCode::SUCCESS);
        outcome.flaky.push("x".into());
        assert_eq!(print_outcome(&outcome), ExitCode::FAILURE);
    }
}
