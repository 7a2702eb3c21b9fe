//! Tests of `holdfast pool connect` with failing elements. The elements are threads of the test.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::spawn;

use holdfast_api::pool::{Element, ElementEvent, ElementService, RegistrationRequest};
use holdfast_testbed::cluster::find_program;
use holdfast_testbed::process_lab::command_words;

use super::{PATIENCE, PoolHost};

/// Time limit for an answer in seconds, equal to [`PATIENCE`].
pub const LONG_LINGER_S: &str = "120";

/// Brings up a host with registrar and pool daemon; the path is the daemon's socket for programs.
pub fn start_pool_host(name: &str) -> Option<(PoolHost, PathBuf)> {
    let mut host = PoolHost::up(name)?;
    let daemon = find_program("rserpoold").expect("rserpoold");
    host.lab
        .run("n1", "pool", &daemon, &command_words(["pool"]))
        .expect("a pool daemon");
    let socket = host.lab.run_path("n1", "pool-app.sock").expect("a path");
    host.wait_for("a pool daemon", || socket.exists().then_some(()));
    Some((host, socket))
}

/// A session of `holdfast pool connect` with input from the test.
pub struct ConnectCommand {
    child: Child,
    pub input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    stderr: BufReader<ChildStderr>,
}

impl ConnectCommand {
    pub fn start(host: &PoolHost, handle: &str, linger: &str) -> ConnectCommand {
        let mut child = host
            .command(&["pool", "connect", handle, "--linger", linger])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a command that runs");
        ConnectCommand {
            input: child.stdin.take(),
            output: BufReader::new(child.stdout.take().expect("its output")),
            stderr: BufReader::new(child.stderr.take().expect("its notes")),
            child,
        }
    }

    pub fn write(&mut self, text: &str) {
        let input = self.input.as_mut().expect("an open input");
        input.write_all(text.as_bytes()).expect("written");
    }

    /// Closes the input, and waits until the command has seen its end: the thread that reads the input has ended then.
    pub fn close_input(&mut self, host: &PoolHost) {
        // The session has an element, so both threads of the command run.
        self.wait_for_note(": element ");
        self.input = None;
        let tasks = format!("/proc/{}/task", self.child.id());
        host.wait_for("the input's end", || {
            let tasks = std::fs::read_dir(&tasks).expect("a process");
            (tasks.count() <= 2).then_some(())
        });
    }

    pub fn read_line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a line");
        line
    }

    /// Waits for a note with this text.
    pub fn wait_for_note(&mut self, what: &str) {
        let mut note = String::new();
        while !note.contains(what) {
            note.clear();
            let length = self.stderr.read_line(&mut note).expect("a note");
            assert_ne!(length, 0, "no note contains: {what}");
        }
    }

    /// Returns the rest of the output and of the notes, and true if the command succeeded.
    pub fn finish(mut self) -> (String, String, bool) {
        let (mut remaining_output, mut notes) = (String::new(), String::new());
        self.output
            .read_to_string(&mut remaining_output)
            .expect("its output");
        self.stderr.read_to_string(&mut notes).expect("its notes");
        let status = self.child.wait().expect("its end");
        (remaining_output, notes, status.success())
    }
}

/// Messages from elements to the test.
struct ElementReports(Receiver<&'static str>);

impl ElementReports {
    fn wait_for(&self, expected: &str) {
        let report = self
            .0
            .recv_timeout(PATIENCE)
            .expect("a report of an element");
        assert_eq!(report, expected);
    }
}

/// Two elements that number lines. The first element that has received `lines_before_death` lines answers
/// `answers_before_death` of them, and dies when told to; the other element answers all lines and ends the session.
#[derive(Clone)]
struct NumberingElements {
    lines_before_death: u64,
    answers_before_death: u64,
    reports: Sender<&'static str>,
    death_signal: Arc<Mutex<Option<Receiver<()>>>>,
}

impl NumberingElements {
    fn start(
        socket: &Path,
        lines_before_death: u64,
        answers_before_death: u64,
    ) -> (ElementReports, Sender<()>) {
        let (report_sender, report_receiver) = channel();
        let (death_sender, death_receiver) = channel();
        let death_signal = Arc::new(Mutex::new(Some(death_receiver)));
        let numbers = NumberingElements {
            lines_before_death,
            answers_before_death,
            reports: report_sender,
            death_signal,
        };
        for _ in 0..2 {
            let addresses = Vec::new();
            let service = ElementService::Sessions { addresses, port: 0 };
            let element = Element::register(socket, RegistrationRequest::new("numbers", service));
            let (element, numbers_of_element) = (element.expect("a channel"), numbers.clone());
            spawn(move || numbers_of_element.serve(&element));
        }
        let reports = ElementReports(report_receiver);
        reports.wait_for("registered");
        reports.wait_for("registered");
        (reports, death_sender)
    }

    fn serve(&self, element: &Element) {
        let (mut count, mut received) = (0_u64, 0);
        while let Ok(Some(event)) = element.next_event() {
            match event {
                ElementEvent::Registered { .. } => self.reports.send("registered").expect("a test"),
                ElementEvent::Resumed { state, .. } => {
                    count = u64::from_be_bytes(state.try_into().expect("a state"));
                }
                ElementEvent::Data { session, bytes } => {
                    received += 1;
                    let mut death_signal = self.death_signal.lock().expect("a lock");
                    if death_signal.is_none() || received <= self.answers_before_death {
                        count += 1;
                        let answer = [format!("{count} ").as_bytes(), &bytes].concat();
                        element
                            .store_state(session, &count.to_be_bytes())
                            .expect("kept");
                        element.send(session, &answer).expect("sent");
                    }
                    if death_signal.is_some() && received == self.lines_before_death {
                        self.reports.send("asked").expect("a test");
                        let death_receiver = death_signal.take().expect("one death only");
                        death_receiver.recv_timeout(PATIENCE).expect("an end");
                        return;
                    }
                    if count == self.lines_before_death {
                        element.close(session).expect("closed");
                    }
                }
                _ => {}
            }
        }
    }
}

#[test]
fn unanswered_lines_go_to_next_element_after_input_ends() {
    let Some((host, socket)) = start_pool_host("piped") else {
        return;
    };
    let (reports, death_sender) = NumberingElements::start(&socket, 3, 1);
    let mut session = ConnectCommand::start(&host, "numbers", LONG_LINGER_S);
    session.write("a\nb\nc\n");
    session.close_input(&host);
    reports.wait_for("asked");
    // The session has one answer of three, and the state cookie that goes with it.
    assert_eq!(session.read_line(), "1 a\n");
    death_sender.send(()).expect("an element");
    let (remaining_output, notes, success) = session.finish();
    assert_eq!(
        (remaining_output.as_str(), success),
        ("2 b\n3 c\n", true),
        "{notes}"
    );
    assert!(
        notes.contains("without an answer are sent again"),
        "{notes}"
    );
    assert!(notes.contains("which resumed the session"), "{notes}");
}

#[test]
fn only_line_is_answered_after_element_death() {
    let Some((host, socket)) = start_pool_host("only") else {
        return;
    };
    let (reports, death_sender) = NumberingElements::start(&socket, 1, 0);
    let mut session = ConnectCommand::start(&host, "numbers", LONG_LINGER_S);
    session.write("a\n");
    session.close_input(&host);
    reports.wait_for("asked");
    death_sender.send(()).expect("an element");
    let (remaining_output, notes, success) = session.finish();
    assert_eq!(
        (remaining_output.as_str(), success),
        ("1 a\n", true),
        "{notes}"
    );
}
