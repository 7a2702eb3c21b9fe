//! nextest's report, in the JUnit format.

use anyhow::{Context, Result};
use roxmltree::{Document, Node};

use super::failure::TestFailure;

/// All tests of one pass.
#[derive(Debug, Default)]
pub struct TestReport {
    pub tests: Vec<TestCase>,
}

/// One test and its result.
#[derive(Debug, Clone)]
pub struct TestCase {
    /// nextest's id of the test program: `holdfast-bench::moves`.
    pub binary: String,
    /// Path of the test within its program: `postcopy_migrates_there_and_back`.
    pub name: String,
    pub seconds: f64,
    /// `None` for a test that passed.
    pub failure: Option<TestFailure>,
    /// The missing prerequisite, if the test printed `skipped: …` instead of running.
    pub skipped: Option<String>,
}

impl TestCase {
    /// Returns program and test, for display.
    pub fn title(&self) -> String {
        format!("{} {}", self.binary, self.name)
    }
}

impl TestReport {
    /// Reads a report.
    ///
    /// # Errors
    ///
    /// When the text is not XML, or a test in it has no name or no program.
    pub fn parse(text: &str) -> Result<TestReport> {
        let document = Document::parse(text).context("nextest's report is not XML")?;
        let tests = document
            .descendants()
            .filter(|node| node.has_tag_name("testcase"))
            .map(test_case)
            .collect::<Result<_>>()?;
        Ok(TestReport { tests })
    }
}

fn test_case(node: Node<'_, '_>) -> Result<TestCase> {
    let attribute = |name: &str| {
        node.attribute(name)
            .with_context(|| format!("a test in nextest's report has no `{name}`"))
    };
    let child = |names: &[&str]| {
        node.children()
            .find(|child| names.contains(&child.tag_name().name()))
    };
    let text = |name: &str| {
        child(&[name])
            .and_then(|child| child.text())
            .unwrap_or_default()
            .to_owned()
    };
    let output = text("system-out") + &text("system-err");
    let skipped = output
        .lines()
        .find_map(|line| line.strip_prefix("skipped: "));
    let failure = child(&["failure", "error"]).map(|failure| {
        let kind = failure.attribute("type").unwrap_or_default();
        TestFailure::new(kind, &output)
    });
    Ok(TestCase {
        binary: attribute("classname")?.to_owned(),
        name: attribute("name")?.to_owned(),
        seconds: attribute("time")?.parse().unwrap_or_default(),
        failure,
        skipped: skipped.map(str::to_owned),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"<?xml version="1.0" encoding="UTF-8"?>
<testsuites name="nextest-run" tests="2" failures="1">
  <testsuite name="holdfast-bench::moves" tests="2">
    <testcase name="a::b" classname="holdfast-bench::moves" time="0.250">
      <system-err>skipped: no such device</system-err>
    </testcase>
    <testcase name="c" classname="holdfast-bench::moves" time="61.0">
      <failure type="test timeout"/>
      <system-out>running 1 test</system-out>
      <system-err>exceeded &lt;1 s&gt;</system-err>
    </testcase>
  </testsuite>
</testsuites>"#;

    #[test]
    fn tests_are_read_with_time_and_output() {
        let report = TestReport::parse(TEXT).unwrap();
        let [first, second] = &report.tests[..] else {
            panic!("{report:?}");
        };
        assert_eq!(first.title(), "holdfast-bench::moves a::b");
        assert!(first.failure.is_none());
        assert_eq!(first.skipped.as_deref(), Some("no such device"));
        assert_eq!(second.skipped, None);
        assert!((second.seconds - 61.0).abs() < 1e-9);
        let failure = second.failure.as_ref().unwrap();
        assert!(failure.is_exceeded_time());
        assert!(failure.output().ends_with("exceeded <1 s>"));
    }

    #[test]
    fn text_without_report_is_error() {
        assert!(TestReport::parse("no XML").is_err());
        assert!(TestReport::parse("<testsuites><testcase/></testsuites>").is_err());
    }
}
