//! Answers with metrics, in the format that the caller reads: OpenMetrics if the caller accepts it, as Prometheus does,
//! else Prometheus' older text format, as `promtool check metrics` and people read it.

use std::fmt::Write;

use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};

/// Content type of OpenMetrics, which `prometheus-client` writes.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Content type of Prometheus' text format.
const PROMETHEUS_TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Returns the answer to a request with these headers; `open_metrics` is the text in OpenMetrics.
pub fn metrics_response(request: &HeaderMap, open_metrics: String) -> Response {
    let accepted = request.get_all(header::ACCEPT).iter();
    let mut accepted = accepted.filter_map(|value| value.to_str().ok());
    match accepted.any(|value| value.contains("application/openmetrics-text")) {
        true => ([(header::CONTENT_TYPE, OPEN_METRICS)], open_metrics).into_response(),
        false => {
            let text = prometheus_text(&open_metrics);
            ([(header::CONTENT_TYPE, PROMETHEUS_TEXT)], text).into_response()
        }
    }
}

/// Converts OpenMetrics to Prometheus' text format: there, a counter's family has the name of its samples, and neither
/// units nor an end are marked.
fn prometheus_text(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len());
    let mut lines = open_metrics.lines().peekable();
    while let Some(line) = lines.next() {
        let is_counter = |line: &str| line.starts_with("# TYPE ") && line.ends_with(" counter");
        let names_counter = is_counter(line)
            || line.starts_with("# HELP ") && lines.peek().is_some_and(|next| is_counter(next));
        // Writing to a string cannot fail.
        let _ = if line.starts_with("# UNIT ") || line == "# EOF" {
            Ok(())
        } else if names_counter {
            let mut words = line.splitn(4, ' ');
            let mut word = || words.next().unwrap_or_default();
            let (hash, keyword, name) = (word(), word(), word());
            writeln!(text, "{hash} {keyword} {name}_total {}", word())
        } else {
            writeln!(text, "{line}")
        };
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPEN: &str = "# HELP holdfast_drops Packets dropped.\n\
                        # TYPE holdfast_drops counter\n\
                        holdfast_drops_total{reason=\"full\"} 7\n\
                        # HELP holdfast_freeze_seconds Freeze.\n\
                        # TYPE holdfast_freeze_seconds histogram\n\
                        # UNIT holdfast_freeze_seconds seconds\n\
                        holdfast_freeze_seconds_count 1\n\
                        # EOF\n";

    #[test]
    fn text_format_names_counters_as_their_samples() {
        assert_eq!(
            prometheus_text(OPEN),
            "# HELP holdfast_drops_total Packets dropped.\n\
             # TYPE holdfast_drops_total counter\n\
             holdfast_drops_total{reason=\"full\"} 7\n\
             # HELP holdfast_freeze_seconds Freeze.\n\
             # TYPE holdfast_freeze_seconds histogram\n\
             holdfast_freeze_seconds_count 1\n"
        );
    }

    #[test]
    fn format_is_what_the_caller_accepts() {
        let content_type = |accepted: Option<&'static str>| {
            let mut headers = HeaderMap::new();
            if let Some(accepted) = accepted {
                headers.insert(header::ACCEPT, accepted.parse().unwrap());
            }
            let response = metrics_response(&headers, OPEN.to_owned());
            response.headers()[header::CONTENT_TYPE]
                .to_str()
                .unwrap()
                .to_owned()
        };
        let prometheus =
            "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5";
        assert_eq!(content_type(Some(prometheus)), OPEN_METRICS);
        assert_eq!(content_type(Some("*/*")), PROMETHEUS_TEXT);
        assert_eq!(content_type(None), PROMETHEUS_TEXT);
    }
}
