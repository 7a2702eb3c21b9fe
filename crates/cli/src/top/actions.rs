//! Keys of `holdfast top`, and the requests that they cause.

use anyhow::Result;
use holdfast_api::control::{
    BlockingControlClient, DrainRequest, DrainState, ManagedProcessEntry, MigrationRequest,
    PinRequest, SocketStrategy,
};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::snapshot::Snapshot;
use crate::daemon_client::DaemonArgs;

/// A request to the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// Move a process to a node.
    Move {
        /// PID of the root of the process tree.
        pid: i32,
        /// Name of the node.
        to: String,
    },
    /// Drain this node.
    Drain,
    /// End the drain.
    Undrain,
    /// Switch balancing on or off.
    SetBalancing(bool),
    /// Tell what the node would move now.
    Plan,
    /// Pin a process to this node, or free it.
    Pin(PinRequest),
}

/// A question that the user has to answer first.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Question {
    /// The node for a process.
    Target {
        /// PID of the process to move.
        pid: i32,
        /// Name of the process to move.
        name: String,
        /// Nodes that can be chosen.
        nodes: Vec<String>,
        /// Position of the chosen node.
        chosen: usize,
    },
    /// Whether this node is to be drained.
    Drain,
}

/// State of the dialogue with the user.
#[derive(Debug, Default)]
pub struct Keyboard {
    /// PID of the chosen process.
    chosen: Option<i32>,
    question: Option<Question>,
    /// Answer to the last request.
    message: Option<String>,
    /// The reason that the daemon does not answer.
    contact_problem: Option<String>,
    has_ended: bool,
}

impl Keyboard {
    /// Returns true if the user has ended the program.
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Returns the PID of the chosen process.
    pub fn chosen(&self) -> Option<i32> {
        self.chosen
    }

    /// Returns the line under the tables: a question, an answer or a problem.
    pub fn line(&self) -> String {
        match (&self.question, &self.contact_problem, &self.message) {
            (
                Some(Question::Target {
                    name,
                    nodes,
                    chosen,
                    ..
                }),
                ..,
            ) => {
                let nodes = nodes
                    .iter()
                    .enumerate()
                    .map(|(at, node)| match at == *chosen {
                        true => format!("[{node}]"),
                        false => node.clone(),
                    });
                let nodes: Vec<String> = nodes.collect();
                format!(
                    "move {name} to {}   (left and right choose, enter moves, esc leaves it here)",
                    nodes.join(" ")
                )
            }
            (Some(Question::Drain), ..) => {
                "drain this node: move everything off? (y, or any other key to leave it)".to_owned()
            }
            (None, Some(problem), _) => format!("the screen is old: {problem}"),
            (None, None, Some(message)) => message.clone(),
            (None, None, None) => String::new(),
        }
    }

    /// Notes why the daemon does not answer, or that it does.
    pub fn note_contact(&mut self, problem: Option<String>) {
        self.contact_problem = problem;
    }

    /// Notes the answer to a request.
    pub fn note_answer(&mut self, answer: Result<String>) {
        self.message = Some(answer.unwrap_or_else(|error| format!("{error:#}")));
    }

    /// Keeps the choice at a process that exists.
    pub fn follow(&mut self, snapshot: &Snapshot) {
        let processes = &snapshot.balance.processes;
        let is_there = |pid: i32| processes.iter().any(|process| process.pid == pid);
        if !self.chosen.is_some_and(is_there) {
            self.chosen = processes.first().map(|process| process.pid);
        }
    }

    /// Takes a key. Returns what is to be asked of the daemon.
    pub fn press(&mut self, key: KeyEvent, snapshot: &Snapshot) -> Option<Request> {
        let is_interrupt =
            key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
        if is_interrupt {
            self.has_ended = true;
            return None;
        }
        match self.question.take() {
            Some(question) => self.answer(question, key.code),
            None => self.command(key.code, snapshot),
        }
    }

    fn answer(&mut self, question: Question, key: KeyCode) -> Option<Request> {
        match (question, key) {
            (Question::Drain, KeyCode::Char('y')) => Some(Request::Drain),
            (Question::Drain, _) => None,
            (
                Question::Target {
                    pid, nodes, chosen, ..
                },
                KeyCode::Enter,
            ) => {
                let to = nodes.into_iter().nth(chosen)?;
                Some(Request::Move { pid, to })
            }
            (
                Question::Target {
                    pid,
                    name,
                    nodes,
                    chosen,
                },
                KeyCode::Left | KeyCode::Right,
            ) => {
                let step = if key == KeyCode::Right {
                    1
                } else {
                    nodes.len() - 1
                };
                let chosen = (chosen + step) % nodes.len();
                self.question = Some(Question::Target {
                    pid,
                    name,
                    nodes,
                    chosen,
                });
                None
            }
            (question @ Question::Target { .. }, key) => {
                if key != KeyCode::Esc && key != KeyCode::Char('q') {
                    self.question = Some(question);
                }
                None
            }
        }
    }

    fn command(&mut self, key: KeyCode, snapshot: &Snapshot) -> Option<Request> {
        match key {
            KeyCode::Char('q') | KeyCode::Esc => self.has_ended = true,
            KeyCode::Up | KeyCode::Char('k') => self.choose(snapshot, false),
            KeyCode::Down | KeyCode::Char('j') => self.choose(snapshot, true),
            KeyCode::Char('d') => match snapshot.drain.state {
                DrainState::Off => self.question = Some(Question::Drain),
                _ => self.message = Some("this node is being drained already".to_owned()),
            },
            KeyCode::Char('u') => return Some(Request::Undrain),
            KeyCode::Char('b') => return Some(Request::SetBalancing(!snapshot.balance.on)),
            KeyCode::Char('p') => return Some(Request::Plan),
            KeyCode::Char('m') => self.ask_for_target(snapshot),
            KeyCode::Char('i') => return self.pin_chosen(snapshot),
            _ => {}
        }
        None
    }

    fn choose(&mut self, snapshot: &Snapshot, next: bool) {
        let processes = &snapshot.balance.processes;
        let is_chosen = |process: &ManagedProcessEntry| Some(process.pid) == self.chosen;
        let Some(at) = processes.iter().position(is_chosen) else {
            return;
        };
        let at = match next {
            true => (at + 1).min(processes.len() - 1),
            false => at.saturating_sub(1),
        };
        self.chosen = processes.get(at).map(|process| process.pid);
    }

    /// Returns the chosen process; none, with a message, if this node has none.
    fn chosen_process<'a>(&mut self, snapshot: &'a Snapshot) -> Option<&'a ManagedProcessEntry> {
        let mut processes = snapshot.balance.processes.iter();
        let process = processes.find(|process| Some(process.pid) == self.chosen);
        if process.is_none() {
            self.message = Some("no process of this node serves the group".to_owned());
        }
        process
    }

    fn pin_chosen(&mut self, snapshot: &Snapshot) -> Option<Request> {
        let process = self.chosen_process(snapshot)?;
        Some(Request::Pin(PinRequest {
            pid: process.pid,
            pinned: !process.pinned,
        }))
    }

    fn ask_for_target(&mut self, snapshot: &Snapshot) {
        let Some(process) = self.chosen_process(snapshot) else {
            return;
        };
        let others = snapshot
            .nodes
            .iter()
            .filter(|node| !node.this_node && node.connected);
        let nodes: Vec<String> = others.map(|node| node.name.clone()).collect();
        if nodes.is_empty() {
            self.message = Some("this node is connected to no other node".to_owned());
            return;
        }
        self.question = Some(Question::Target {
            pid: process.pid,
            name: format!("{} ({})", process.name, process.pid),
            nodes,
            chosen: 0,
        });
    }
}

impl Request {
    /// Sends the request to the daemon. Returns a sentence about the answer.
    ///
    /// # Errors
    /// The daemon refuses, or does not answer.
    pub fn send(&self, daemon: &DaemonArgs, client: &BlockingControlClient) -> Result<String> {
        match self {
            Request::Move { pid, to } => {
                let request = MigrationRequest {
                    pid: *pid,
                    to: to.clone(),
                    sockets: SocketStrategy::default(),
                    clone: false,
                    max_freeze_us: None,
                    post_copy: false,
                    verify: false,
                };
                let accepted = daemon.ask(client, |client| client.migrate(&request))?;
                Ok(format!("migration {} to {to} has begun", accepted.id))
            }
            Request::Drain => {
                let request = DrainRequest { deadline_s: None };
                let report = daemon.ask(client, |client| client.drain(&request))?;
                Ok(format!("the drain of {} has begun", report.node))
            }
            Request::Undrain => {
                let report = daemon.ask(client, |client| client.undrain())?;
                let node = report.node;
                Ok(format!("{node} takes processes and new clients"))
            }
            Request::SetBalancing(on) => {
                let status = daemon.ask(client, |client| client.set_balancing(*on))?;
                let state = if status.on { "on" } else { "off" };
                Ok(format!("balancing is {state} at this node"))
            }
            Request::Pin(request) => {
                daemon.ask(client, |client| client.pin(request))?;
                let rule = if request.pinned {
                    "stays at this node"
                } else {
                    "may move"
                };
                Ok(format!("process {} {rule}", request.pid))
            }
            Request::Plan => {
                let plan = daemon.ask(client, |client| client.balance_plan())?;
                let text = crate::balance::plan_text(&plan, "would move");
                Ok(text.lines().next().unwrap_or_default().to_owned())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::snapshot::tests::snapshot;
    use super::*;

    fn press(keyboard: &mut Keyboard, code: KeyCode, snapshot: &Snapshot) -> Option<Request> {
        keyboard.press(KeyEvent::new(code, KeyModifiers::NONE), snapshot)
    }

    #[test]
    fn process_moves_to_the_chosen_node() {
        let (mut keyboard, snapshot) = (Keyboard::default(), snapshot());
        keyboard.follow(&snapshot);
        assert_eq!(keyboard.chosen(), Some(41));
        for key in [KeyCode::Down, KeyCode::Down, KeyCode::Char('m')] {
            assert_eq!(press(&mut keyboard, key, &snapshot), None);
        }
        assert!(keyboard.line().starts_with("move game (42) to [n2] n3"));
        assert_eq!(press(&mut keyboard, KeyCode::Left, &snapshot), None);
        let expected = Request::Move {
            pid: 42,
            to: "n3".to_owned(),
        };
        let request = press(&mut keyboard, KeyCode::Enter, &snapshot);
        assert_eq!(request, Some(expected));
        assert_eq!(keyboard.line(), "");
    }

    #[test]
    fn questions_can_be_left() {
        let (mut keyboard, snapshot) = (Keyboard::default(), snapshot());
        keyboard.follow(&snapshot);
        for keys in [
            [KeyCode::Char('m'), KeyCode::Esc],
            [KeyCode::Char('d'), KeyCode::Char('n')],
        ] {
            assert_eq!(press(&mut keyboard, keys[0], &snapshot), None);
            assert_ne!(keyboard.line(), "");
            assert_eq!(press(&mut keyboard, keys[1], &snapshot), None);
            assert_eq!(keyboard.line(), "");
        }
        press(&mut keyboard, KeyCode::Char('d'), &snapshot);
        let request = press(&mut keyboard, KeyCode::Char('y'), &snapshot);
        assert_eq!(request, Some(Request::Drain));
        assert!(!keyboard.has_ended());
        press(&mut keyboard, KeyCode::Char('q'), &snapshot);
        assert!(keyboard.has_ended());
    }

    #[test]
    fn choice_stays_at_a_process_that_exists() {
        let (mut keyboard, mut snapshot) = (Keyboard::default(), snapshot());
        keyboard.follow(&snapshot);
        press(&mut keyboard, KeyCode::Down, &snapshot);
        snapshot.balance.processes.remove(1);
        keyboard.follow(&snapshot);
        assert_eq!(keyboard.chosen(), Some(41));
        snapshot.balance.processes.clear();
        keyboard.follow(&snapshot);
        assert_eq!(keyboard.chosen(), None);
        assert_eq!(press(&mut keyboard, KeyCode::Char('m'), &snapshot), None);
        assert_eq!(keyboard.line(), "no process of this node serves the group");
    }

    #[test]
    fn key_pins_the_chosen_process_or_frees_it() {
        let (mut keyboard, mut snapshot) = (Keyboard::default(), snapshot());
        keyboard.follow(&snapshot);
        for pinned in [true, false] {
            let request = press(&mut keyboard, KeyCode::Char('i'), &snapshot);
            assert_eq!(request, Some(Request::Pin(PinRequest { pid: 41, pinned })));
            snapshot.balance.processes[0].pinned = pinned;
        }
        snapshot.balance.processes.clear();
        keyboard.follow(&snapshot);
        assert_eq!(press(&mut keyboard, KeyCode::Char('i'), &snapshot), None);
    }

    #[test]
    fn key_switches_balancing_to_the_other_state() {
        let (mut keyboard, mut snapshot) = (Keyboard::default(), snapshot());
        let request = press(&mut keyboard, KeyCode::Char('b'), &snapshot);
        assert_eq!(request, Some(Request::SetBalancing(true)));
        snapshot.balance.on = true;
        let request = press(&mut keyboard, KeyCode::Char('b'), &snapshot);
        assert_eq!(request, Some(Request::SetBalancing(false)));
    }
}
