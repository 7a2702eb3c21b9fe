//! How an element's load is found out.

use std::process::Stdio;
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::ports;

/// How long a command may take to tell the load.
const COMMAND: Duration = Duration::from_secs(10);
/// Units of a processor's time in /proc, per second.
const TICKS: f64 = 100.0;

/// Where the load comes from.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// It is always so much, 0 to 1.
    Fixed(f64),
    /// Processor time of the program's process group, as a share of what all processors have.
    Cpu,
    /// What a command of the shell prints.
    Command(String),
}

impl FromStr for Source {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Source> {
        if text == "cpu" {
            return Ok(Source::Cpu);
        }
        if let Some(command) = text.strip_prefix("cmd:") {
            ensure!(!command.trim().is_empty(), "cmd: needs a command");
            return Ok(Source::Command(command.to_owned()));
        }
        let load = share(text).with_context(|| {
            format!("`{text}` is no load: write cpu, cmd:COMMAND, 0 to 1, or a percentage")
        })?;
        Ok(Source::Fixed(load))
    }
}

/// 0 to 1, from such a number, or from a percentage: a number above 1, or with a percent sign.
pub fn share(text: &str) -> Result<f64> {
    let text = text.trim();
    let (number, percent) = match text.strip_suffix('%') {
        Some(number) => (number.trim_end(), true),
        None => (text, false),
    };
    let value: f64 = number.parse().with_context(|| format!("`{text}`"))?;
    let value = match percent || value > 1.0 {
        true => value / 100.0,
        false => value,
    };
    ensure!((0.0..=1.0).contains(&value), "{text} is not within 0 to 1");
    Ok(value)
}

/// Finds the load out again and again.
pub struct Meter {
    source: Source,
    group: i32,
    processors: f64,
    before: Option<(Instant, u64)>,
}

impl Meter {
    /// Of the program whose process group is `group`.
    pub fn new(source: Source, group: i32) -> Meter {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Meter {
            source,
            group,
            processors: processors as f64,
            before: None,
        }
    }

    /// Whether the load changes.
    pub fn changes(&self) -> bool {
        !matches!(self.source, Source::Fixed(_))
    }

    /// The load now, 0 to 1. Of the processor: since the last call.
    ///
    /// # Errors
    /// The command fails, or prints no load.
    pub async fn read(&mut self) -> Result<f64> {
        match &self.source {
            Source::Fixed(load) => Ok(*load),
            Source::Cpu => Ok(self.processor_time()),
            Source::Command(command) => ask(command).await,
        }
    }

    fn processor_time(&mut self) -> f64 {
        let now = Instant::now();
        let used = ports::group(self.group)
            .iter()
            .map(|process| process.used_ticks)
            .sum();
        let Some((then, before)) = self.before.replace((now, used)) else {
            return 0.0;
        };
        let elapsed = now.duration_since(then).as_secs_f64();
        // What a process had used that has ended meanwhile is missing.
        let used = used.saturating_sub(before) as f64 / TICKS;
        (used / (elapsed * self.processors).max(1e-9)).clamp(0.0, 1.0)
    }
}

async fn ask(command: &str) -> Result<f64> {
    let output = tokio::process::Command::new("sh")
        .args(["-c", command])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(COMMAND, output)
        .await
        .with_context(|| format!("`{command}` takes longer than {} s", COMMAND.as_secs()))?
        .with_context(|| format!("`{command}`"))?;
    if !output.status.success() {
        bail!("`{command}`: {}", output.status);
    }
    let text = String::from_utf8_lossy(&output.stdout);
    share(&text).with_context(|| format!("`{command}` prints no load"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_are_shares_or_percentages() {
        for (text, load) in [
            ("0", 0.0),
            ("0.25\n", 0.25),
            ("1", 1.0),
            ("25", 0.25),
            ("1%", 0.01),
            ("100 %", 1.0),
        ] {
            assert_eq!(share(text).expect(text), load, "{text}");
        }
        for text in ["", "x", "-1", "101", "nan", "1 2"] {
            assert!(share(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_source_is_what_is_written() {
        assert_eq!("cpu".parse::<Source>().unwrap(), Source::Cpu);
        let command = Source::Command("cat f".to_owned());
        assert_eq!("cmd:cat f".parse::<Source>().unwrap(), command);
        assert_eq!("50%".parse::<Source>().unwrap(), Source::Fixed(0.5));
        for text in ["cmd:", "cpus", "-1"] {
            assert!(text.parse::<Source>().is_err(), "{text}");
        }
    }

    #[tokio::test]
    async fn a_command_tells_the_load_or_why_not() {
        let read = async |command: &str| {
            let source = Source::Command(command.to_owned());
            Meter::new(source, 0).read().await
        };
        assert_eq!(read("echo 40%").await.unwrap(), 0.4);
        assert!(read("echo none").await.is_err());
        assert!(read("false").await.is_err());
    }

    #[tokio::test]
    async fn a_busy_group_has_a_load() {
        let own = nix::unistd::getpgrp().as_raw();
        let mut meter = Meter::new(Source::Cpu, own);
        assert_eq!(meter.read().await.unwrap(), 0.0);
        // However slow the machine is, this process has some of its time at last.
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut sum = 0_u64;
        loop {
            sum = (0..5_000_000).fold(sum, |sum, i| sum.wrapping_mul(31) ^ i);
            if meter.read().await.unwrap() > 0.0 {
                break;
            }
            assert!(Instant::now() < deadline, "{sum}");
        }
    }
}
