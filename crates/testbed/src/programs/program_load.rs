//! Loads: our own connections, or tools that come with a program.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{CLIENT_HOST, RunningProgram};
use crate::connection_load::{self, RequestProtocol, open_connections};
use crate::process_lab::find_system_program;

/// Interval between messages of a connection.
const MESSAGE_INTERVAL: Duration = Duration::from_millis(20);

/// Load of a program.
#[derive(Debug)]
pub enum ProgramLoad {
    /// Connections with every byte compared.
    Connections(RequestProtocol),
    /// Tools, started in this order.
    Tools(&'static [LoadTool]),
}

/// A tool that loads a program until it gets a signal.
#[derive(Debug)]
pub struct LoadTool {
    /// File name of the tool.
    pub program: &'static str,
    /// Debian package of the tool.
    pub package: &'static str,
    /// Arguments; `{host}` and `{port}` stand for the program's address.
    pub arguments: &'static [&'static str],
    /// Signal that ends the tool.
    pub end_signal: Signal,
    /// Checks the tool's output for errors; returns the amount of work done.
    pub check_output: fn(&str) -> Result<String>,
}

/// A load that runs on a program.
pub enum RunningLoad {
    /// Our own connections.
    Connections(connection_load::ConnectionLoad),
    /// Tools that come with the program.
    Tools(Vec<RunningLoadTool>),
}

/// A load tool that runs on a client host.
pub struct RunningLoadTool {
    tool: &'static LoadTool,
    child: Child,
    log: PathBuf,
}

impl ProgramLoad {
    /// Starts the load on a running program.
    pub(super) fn start(&self, scene: &RunningProgram) -> Result<RunningLoad> {
        match self {
            Self::Connections(dialect) => {
                let lab = scene.cluster.lab();
                let streams =
                    open_connections(lab, CLIENT_HOST, scene.address, scene.program.connections)?;
                Ok(RunningLoad::Connections(
                    connection_load::ConnectionLoad::start_with_protocol(
                        streams,
                        MESSAGE_INTERVAL,
                        *dialect,
                    )?,
                ))
            }
            Self::Tools(tools) => {
                let runs = tools.iter().map(|tool| tool.start(scene));
                Ok(RunningLoad::Tools(runs.collect::<Result<_>>()?))
            }
        }
    }
}

impl RunningLoad {
    /// Ends the load; returns its result, or an error if anything failed on the way.
    pub(super) fn end(self) -> Result<String> {
        match self {
            Self::Connections(load) => {
                let compared = load.compared.clone();
                let turns: u64 = load
                    .connections()
                    .iter()
                    .map(connection_load::LoadConnection::answers_received)
                    .sum();
                let broken = load
                    .connections()
                    .iter()
                    .filter(|member| member.is_broken());
                let broken = broken.count();
                load.stop()?;
                let wrong = compared.wrong_bytes();
                ensure!(
                    broken == 0 && wrong == 0,
                    "{broken} connections broke, {wrong} bytes were wrong"
                );
                Ok(format!("{turns} answers"))
            }
            Self::Tools(runs) => {
                // Tools end in reverse order; each one is ended, even after an error of another.
                let ended: Vec<_> = runs.into_iter().rev().map(RunningLoadTool::end).collect();
                let said: Vec<String> = ended.into_iter().collect::<Result<_>>()?;
                Ok(said.join(", "))
            }
        }
    }
}

impl LoadTool {
    fn start(&'static self, scene: &RunningProgram) -> Result<RunningLoadTool> {
        let program = find_system_program(self.program, self.package)?;
        let log = scene
            .cluster
            .directory()
            .join(format!("{}.load.log", self.program));
        let file = File::create(&log)?;
        let (host, port) = (scene.address.ip(), scene.address.port());
        let words = self.arguments.iter().map(|word| {
            let word = word.replace("{host}", &host.to_string());
            word.replace("{port}", &port.to_string())
        });
        let child = scene
            .cluster
            .lab()
            .command(CLIENT_HOST)?
            .arg(program)
            .args(words)
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("start {}", self.program))?;
        Ok(RunningLoadTool {
            tool: self,
            child,
            log,
        })
    }
}

impl RunningLoadTool {
    fn end(mut self) -> Result<String> {
        let name = self.tool.program;
        let early_exit = self.child.try_wait()?;
        if early_exit.is_none() {
            kill(Pid::from_raw(self.child.id() as i32), self.tool.end_signal)?;
            self.child.wait()?;
        }
        let said = fs::read_to_string(&self.log)?;
        if let Some(status) = early_exit {
            bail!(
                "{name} ended unexpectedly ({status}): {}",
                last_lines(&said)
            );
        }
        (self.tool.check_output)(&said).with_context(|| format!("{name}: {}", last_lines(&said)))
    }
}

/// Returns the last lines.
fn last_lines(said: &str) -> String {
    let lines: Vec<&str> = said.split(['\n', '\r']).collect();
    lines[lines.len().saturating_sub(12)..].join("\n")
}
