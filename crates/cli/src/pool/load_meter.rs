//! Measurement of an element's load.

use std::collections::HashMap;
use std::process::Stdio;
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};

use super::process_group::{self, GroupProcess};

/// Maximum duration of a command that prints the load.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);
/// Clock ticks per second of processor time in /proc.
const TICKS_PER_SECOND: f64 = 100.0;

/// Source of the load.
#[derive(Clone, Debug, PartialEq)]
pub enum LoadSourceArg {
    /// A fixed load, 0 to 1.
    Fixed(f64),
    /// Processor time of the program's process group, as a share of all processors.
    Cpu,
    /// Output of a shell command.
    Command(String),
}

impl FromStr for LoadSourceArg {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<LoadSourceArg> {
        if text == "cpu" {
            return Ok(LoadSourceArg::Cpu);
        }
        if let Some(command) = text.strip_prefix("cmd:") {
            ensure!(!command.trim().is_empty(), "cmd: needs a command");
            return Ok(LoadSourceArg::Command(command.to_owned()));
        }
        let load = parse_share(text).with_context(|| {
            format!("`{text}` is not a load: write cpu, cmd:COMMAND, 0 to 1, or a percentage")
        })?;
        Ok(LoadSourceArg::Fixed(load))
    }
}

/// Parses a share: a number of 0 to 1, or a percentage (a number above 1, or with a percent sign).
pub fn parse_share(text: &str) -> Result<f64> {
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

/// Receiver of measured loads. Measuring runs in its own task, because a command may hang.
pub struct LoadReceiver(mpsc::Receiver<Result<f64>>);

impl LoadReceiver {
    /// Starts measuring the program with process group `group`, at this interval.
    pub fn start(source: LoadSourceArg, group: i32, every: Duration) -> LoadReceiver {
        let (sender, loads) = mpsc::channel(1);
        tokio::spawn(async move {
            let mut meter = LoadMeter::new(source, group);
            let mut interval = interval(every);
            interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                interval.tick().await;
                if sender.send(meter.read().await).await.is_err() || !meter.can_change() {
                    return;
                }
            }
        });
        LoadReceiver(loads)
    }

    /// Waits for the next load; forever if the load is fixed.
    ///
    /// # Errors
    /// The command fails or prints no load, or the program has left its process group.
    pub async fn next_load(&mut self) -> Result<f64> {
        match self.0.recv().await {
            Some(load) => load,
            None => std::future::pending().await,
        }
    }
}

/// Measures the load repeatedly.
struct LoadMeter {
    source: LoadSourceArg,
    group: i32,
    processors: f64,
    last_sample: Option<GroupSample>,
}

/// A snapshot of a group's processes, by PID.
struct GroupSample {
    taken_at: Instant,
    processes: HashMap<i32, GroupProcess>,
}

impl LoadMeter {
    fn new(source: LoadSourceArg, group: i32) -> LoadMeter {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        LoadMeter {
            source,
            group,
            processors: processors as f64,
            last_sample: None,
        }
    }

    /// Returns true if the load can change.
    fn can_change(&self) -> bool {
        !matches!(self.source, LoadSourceArg::Fixed(_))
    }

    /// Returns the load, 0 to 1. For processor time: since the last call.
    async fn read(&mut self) -> Result<f64> {
        match &self.source {
            LoadSourceArg::Fixed(load) => Ok(*load),
            LoadSourceArg::Cpu => self.processor_time(),
            LoadSourceArg::Command(command) => run_command(command).await,
        }
    }

    fn processor_time(&mut self) -> Result<f64> {
        let processes = process_group::group_processes(self.group).into_iter();
        let now = GroupSample {
            taken_at: Instant::now(),
            processes: processes.map(|process| (process.id, process)).collect(),
        };
        ensure!(
            !now.processes.is_empty(),
            "the program's process group is empty; keep the program in the foreground, or give --load cmd:COMMAND"
        );
        let Some(before) = self.last_sample.replace(now) else {
            return Ok(0.0);
        };
        let Some(now) = &self.last_sample else {
            return Ok(0.0);
        };
        let elapsed = now.taken_at.duration_since(before.taken_at).as_secs_f64();
        let used = used_ticks(&before.processes, &now.processes) as f64 / TICKS_PER_SECOND;
        Ok((used / (elapsed * self.processors).max(1e-9)).clamp(0.0, 1.0))
    }
}

/// Returns the ticks used by a group's processes between two snapshots, including processes that ended between them.
fn used_ticks(before: &HashMap<i32, GroupProcess>, now: &HashMap<i32, GroupProcess>) -> u64 {
    let mut own_ticks = 0;
    let mut children_ticks = 0;
    for (id, process) in now {
        let (used, children) = before
            .get(id)
            .map_or((0, 0), |old| (old.used_ticks, old.children_ticks));
        own_ticks += process.used_ticks.saturating_sub(used);
        children_ticks += process.children_ticks.saturating_sub(children);
    }
    // The total of an ended process is in its parent's figure: subtract the part that the first snapshot counted.
    let ended = before.iter().filter(|(id, _)| !now.contains_key(*id));
    let counted: u64 = ended
        .map(|(_, process)| process.used_ticks + process.children_ticks)
        .sum();
    own_ticks + children_ticks.saturating_sub(counted)
}

async fn run_command(command: &str) -> Result<f64> {
    let output = tokio::process::Command::new("sh")
        .args(["-c", command])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(COMMAND_TIMEOUT, output)
        .await
        .with_context(|| {
            format!(
                "`{command}` takes longer than {} s",
                COMMAND_TIMEOUT.as_secs()
            )
        })?
        .with_context(|| format!("`{command}`"))?;
    if !output.status.success() {
        bail!("`{command}`: {}", output.status);
    }
    let text = String::from_utf8_lossy(&output.stdout);
    parse_share(&text).with_context(|| format!("`{command}` prints no load"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_is_a_share_or_percentage() {
        for (text, load) in [
            ("0", 0.0),
            ("0.25\n", 0.25),
            ("1", 1.0),
            ("25", 0.25),
            ("1%", 0.01),
            ("100 %", 1.0),
        ] {
            assert_eq!(parse_share(text).expect(text), load, "{text}");
        }
        for text in ["", "x", "-1", "101", "nan", "1 2"] {
            assert!(parse_share(text).is_err(), "{text}");
        }
    }

    #[test]
    fn load_source_is_parsed() {
        assert_eq!("cpu".parse::<LoadSourceArg>().unwrap(), LoadSourceArg::Cpu);
        let command = LoadSourceArg::Command("cat f".to_owned());
        assert_eq!("cmd:cat f".parse::<LoadSourceArg>().unwrap(), command);
        assert_eq!(
            "50%".parse::<LoadSourceArg>().unwrap(),
            LoadSourceArg::Fixed(0.5)
        );
        for text in ["cmd:", "cpus", "-1"] {
            assert!(text.parse::<LoadSourceArg>().is_err(), "{text}");
        }
    }

    #[tokio::test]
    async fn command_gives_the_load_or_an_error() {
        let read = async |command: &str| {
            let source = LoadSourceArg::Command(command.to_owned());
            LoadMeter::new(source, 0).read().await
        };
        assert_eq!(read("echo 40%").await.unwrap(), 0.4);
        assert!(read("echo none").await.is_err());
        assert!(read("false").await.is_err());
    }

    #[test]
    fn ended_worker_time_is_counted_once() {
        let snapshot = |processes: &[(i32, u64, u64)]| {
            let process = |&(id, used_ticks, children_ticks): &(i32, u64, u64)| {
                let process = GroupProcess {
                    id,
                    used_ticks,
                    children_ticks,
                };
                (id, process)
            };
            processes.iter().map(process).collect::<HashMap<_, _>>()
        };
        let before = snapshot(&[(1, 100, 0), (2, 500, 0)]);
        // Its worker used 20 more ticks, and ended.
        assert_eq!(used_ticks(&before, &snapshot(&[(1, 110, 520)])), 30);
        // No process waited for the worker: its last use is unknown.
        assert_eq!(used_ticks(&before, &snapshot(&[(1, 110, 0)])), 10);
        // One worker per request, none of them in a snapshot.
        assert_eq!(
            used_ticks(&before, &snapshot(&[(1, 100, 40), (2, 500, 0)])),
            40
        );
        // A new worker.
        assert_eq!(
            used_ticks(&before, &snapshot(&[(1, 100, 0), (2, 500, 0), (3, 7, 0)])),
            7
        );
    }

    #[tokio::test]
    async fn empty_group_has_no_load() {
        let error = LoadMeter::new(LoadSourceArg::Cpu, i32::MAX)
            .read()
            .await
            .unwrap_err();
        assert!(error.to_string().contains("foreground"), "{error}");
    }

    #[tokio::test]
    async fn a_busy_group_has_a_load() {
        let process_group = nix::unistd::getpgrp().as_raw();
        let mut meter = LoadMeter::new(LoadSourceArg::Cpu, process_group);
        assert_eq!(meter.read().await.unwrap(), 0.0);
        // Even on a slow machine, this process eventually gets some processor time.
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
