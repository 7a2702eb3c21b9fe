//! The reason that a test failed: its time was exceeded, or its result was wrong.

/// Start of the message of a test that exceeded its time.
const EXCEEDED_TIME: &str = "exceeded time:";
/// nextest's name for a test that it terminated.
const TIMEOUT: &str = "test timeout";
/// Maximum length of a reason in the summary, in characters.
const REASON_MAX: usize = 400;

/// A failed test: nextest's name for the kind of failure, and the complete output.
#[derive(Debug, Clone)]
pub struct TestFailure {
    kind: String,
    output: String,
}

impl TestFailure {
    pub fn new(kind: &str, output: &str) -> TestFailure {
        TestFailure {
            kind: kind.to_owned(),
            output: output.to_owned(),
        }
    }

    /// Returns the complete output of the test.
    pub fn output(&self) -> &str {
        &self.output
    }

    /// Returns true if the only problem was time: nextest terminated the test, or every reported panic and error says
    /// so.
    pub fn is_exceeded_time(&self) -> bool {
        let reports = failure_reports(&self.output);
        let all_timed_out = reports.iter().all(|report| report.contains(EXCEEDED_TIME));
        all_timed_out && (self.kind == TIMEOUT || !reports.is_empty())
    }

    /// Returns the first panic or error, in one line of at most `REASON_MAX` characters.
    pub fn reason(&self) -> String {
        let reports = failure_reports(&self.output);
        let text = reports.first().unwrap_or(&self.kind);
        let words: Vec<&str> = text.split_whitespace().collect();
        words.join(" ").chars().take(REASON_MAX).collect()
    }
}

/// Returns the message of each panic, and the error that a test returned.
fn failure_reports(output: &str) -> Vec<String> {
    let mut reports: Vec<String> = Vec::new();
    let mut in_report = false;
    for line in output.lines() {
        let is_panic = line.starts_with("thread '") && line.contains("panicked at");
        if is_panic || line.starts_with("Error: ") {
            reports.push(String::new());
            in_report = true;
        } else if line.starts_with("note: run with") || line.starts_with("stack backtrace:") {
            in_report = false;
        }
        if let (true, Some(report)) = (in_report, reports.last_mut()) {
            report.push_str(line);
            report.push('\n');
        }
    }
    reports
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_exceeded(kind: &str, output: &str) -> bool {
        TestFailure::new(kind, output).is_exceeded_time()
    }

    #[test]
    fn test_terminated_by_nextest_exceeds_time() {
        assert!(is_exceeded(TIMEOUT, "running 1 test\n"));
        assert!(is_exceeded(TIMEOUT, ""));
    }

    #[test]
    fn wrong_result_before_timeout_is_wrong() {
        let output = "thread 'client' (8) panicked at c.rs:3:1:\nreset by peer\n";
        assert!(!is_exceeded(TIMEOUT, output));
    }

    #[test]
    fn panic_exceeds_time_by_message_alone() {
        let late = "thread 'main' (8) panicked at c.rs:3:1:\nexceeded time: no answer\n\
                    note: run with `RUST_BACKTRACE=1` to display a backtrace\n";
        assert!(is_exceeded("test failure", late));
        let wrong = "thread 'main' (8) panicked at c.rs:3:1:\nassertion failed\n\
                     note: run with `RUST_BACKTRACE=1` to display a backtrace\nexceeded time: elsewhere\n";
        assert!(!is_exceeded("test failure", wrong));
    }

    #[test]
    fn wrong_report_among_timeouts_is_wrong() {
        let both = "thread 'a' (8) panicked at c.rs:3:1:\n127 wrong bytes\n\
                    thread 'main' (7) panicked at c.rs:9:1:\nexceeded time: no answer\n";
        assert!(!is_exceeded("test failure", both));
    }

    #[test]
    fn returned_error_exceeds_time_by_causes() {
        let output =
            "Error: move it to n2\n\nCaused by:\n    exceeded time: waited 60s until it moves\n";
        assert!(is_exceeded("test failure", output));
        assert!(!is_exceeded("test failure", "Error: move it to n2\n"));
    }

    #[test]
    fn reason_is_first_report_in_one_line() {
        let output =
            "thread 'a' (8) panicked at c.rs:3:1:\nassertion failed\n  left: 1\nError: no\n";
        let reason = TestFailure::new("test failure", output).reason();
        assert_eq!(
            reason,
            "thread 'a' (8) panicked at c.rs:3:1: assertion failed left: 1"
        );
        assert_eq!(TestFailure::new(TIMEOUT, "").reason(), TIMEOUT);
    }

    #[test]
    fn failure_without_report_is_wrong() {
        assert!(!is_exceeded("test failure", "killed by a signal\n"));
    }
}
