//! Results of the demonstration, and their comparison with its promises.

use std::time::Duration;

use serde::Serialize;

use super::client::ClientCounts;
use super::{FailureResults, PoolDemoSpec};

/// Results of the demonstration.
#[derive(Debug, Serialize)]
pub struct PoolReport {
    /// Parameters of the demonstration.
    pub spec: PoolDemoSpec,
    /// True if every promise is kept.
    pub passed: bool,
    /// Promises of the demonstration that were broken.
    pub problems: Vec<String>,
    /// Results of the client.
    pub client: ClientCounts,
    /// Recovery of the pool.
    pub deaths: FailureResults,
    /// Duration of the demonstration, seconds.
    pub total_s: f64,
}

impl PoolReport {
    pub(super) fn new(
        spec: &PoolDemoSpec,
        client: ClientCounts,
        deaths: FailureResults,
        total: Duration,
    ) -> PoolReport {
        let mut report = PoolReport {
            spec: spec.clone(),
            passed: false,
            problems: Vec::new(),
            client,
            deaths,
            total_s: total.as_secs_f64(),
        };
        report.problems = report.problems();
        report.passed = report.problems.is_empty();
        report
    }

    fn problems(&self) -> Vec<String> {
        let (client, living) = (&self.client, usize::from(self.spec.elements) - 1);
        let mut problems = Vec::new();
        let mut expect = |kept: bool, problem: String| {
            if !kept {
                problems.push(problem);
            }
        };
        expect(
            client.failures == 0 && client.requests > 0,
            format!("{} of {} requests failed", client.failures, client.requests),
        );
        let elements_served = client.answers.len();
        expect(
            elements_served == usize::from(self.spec.elements),
            format!(
                "only {elements_served} of {} servers answered requests",
                self.spec.elements
            ),
        );
        let elements_min = self.deaths.elements_min;
        expect(
            elements_min >= living,
            format!(
                "{} elements were lost with the registrar",
                living - elements_min.min(living)
            ),
        );
        problems
    }

    /// Returns the report as text of several lines.
    pub fn text(&self) -> String {
        let (client, deaths) = (&self.client, &self.deaths);
        let answers = client.answers.iter();
        let answers: Vec<String> = answers
            .map(|(host, count)| format!("{host} {count}"))
            .collect();
        let living = usize::from(self.spec.elements) - 1;
        let rows = [
            ("requests", client.requests.to_string()),
            ("failures", client.failures.to_string()),
            ("failed attempts", client.retries.to_string()),
            ("longest request", format!("{:.2} s", client.longest_s)),
            ("answers", answers.join(", ")),
            (
                "killed server left the pool",
                format!("after {:.2} s", deaths.element_s),
            ),
            (
                "killed registrar's elements moved",
                format!("after {:.2} s", deaths.registrar_s),
            ),
            (
                "fewest elements listed meanwhile",
                format!("{} of {living}", deaths.elements_min),
            ),
            ("total time", format!("{:.1} s", self.total_s)),
        ];
        let mut text: String = rows
            .map(|(name, value)| format!("{name:<36}{value}\n"))
            .concat();
        for problem in &self.problems {
            text += &format!("NOT AS PROMISED: {problem}\n");
        }
        if self.passed {
            text += "As promised: every request was answered.\n";
        }
        text
    }
}
