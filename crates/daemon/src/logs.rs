//! The log: one line of text or one JSON object per event, on standard error.

use std::io;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::util::SubscriberInitExt;

use crate::config::{LogConfig, LogFormat};

/// Reason why the log cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The filter is invalid.
    #[error("log.filter `{filter}`: {problem}; write `info` or `debug`, for instance")]
    Filter {
        /// The configured filter.
        filter: String,
        /// Description of the problem.
        problem: String,
    },
    /// The process already has a log.
    #[error("the log is set up already; set it up once, at the start")]
    AlreadyInitialised,
}

/// Sends the process's events to standard error, in the format and by the filter of `config`.
///
/// # Errors
/// The filter is invalid, or the process already has a log.
pub fn init(config: &LogConfig) -> Result<(), LogError> {
    subscriber(config, io::stderr)?
        .try_init()
        .map_err(|_| LogError::AlreadyInitialised)
}

/// Checks `config` without setting up a log.
///
/// # Errors
/// The filter is invalid.
pub fn check(config: &LogConfig) -> Result<(), LogError> {
    filter(config).map(|_| ())
}

type Subscriber = Box<dyn tracing::Subscriber + Send + Sync>;

fn subscriber<W>(config: &LogConfig, writer: W) -> Result<Subscriber, LogError>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter(config)?)
        .with_writer(writer);
    Ok(match config.format {
        LogFormat::Text => Box::new(builder.with_ansi(false).finish()),
        LogFormat::Json => Box::new(builder.json().flatten_event(true).finish()),
    })
}

fn filter(config: &LogConfig) -> Result<EnvFilter, LogError> {
    EnvFilter::try_new(&config.filter).map_err(|error| LogError::Filter {
        filter: config.filter.clone(),
        problem: error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Memory(Arc<Mutex<Vec<u8>>>);

    impl Write for Memory {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn log_output(format: LogFormat, filter: &str) -> String {
        let memory = Memory::default();
        let writer = memory.clone();
        let filter = filter.to_owned();
        let subscriber = subscriber(&LogConfig { format, filter }, move || writer.clone()).unwrap();
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(peer = "n2", "connected");
            tracing::debug!("detail");
        });
        let bytes = memory.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn text_format_is_one_uncoloured_line_per_event() {
        let text = log_output(LogFormat::Text, "info");
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(
            text.contains("INFO") && text.contains("connected peer=\"n2\""),
            "{text}"
        );
        assert!(!text.contains('\x1b'), "{text}");
    }

    #[test]
    fn json_format_is_one_object_per_event() {
        let text = log_output(LogFormat::Json, "debug");
        let events: Vec<serde_json::Value> = text
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(events.len(), 2);
        assert_eq!(events[0]["message"], "connected");
        assert_eq!(events[0]["peer"], "n2");
        assert_eq!(events[1]["level"], "DEBUG");
    }

    #[test]
    fn invalid_filter_is_named() {
        let config = LogConfig {
            format: LogFormat::Text,
            filter: "info,=".to_owned(),
        };
        let error = subscriber(&config, io::stderr).err().unwrap().to_string();
        assert!(error.contains("log.filter `info,=`"), "{error}");
    }
}
