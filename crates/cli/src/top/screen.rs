//! The screen: nodes, this node's processes, moves, and a line for the dialogue.

use holdfast_api::control::{DrainState, KnownNodeLoad, ManagedProcessEntry, NodeEntry};
use ratatui::Frame;
use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Borders, Paragraph, Row, StatefulWidget, Table, TableState, Widget};

use super::actions::Keyboard;
use super::snapshot::Snapshot;

/// Columns of a bar for a load of 100 %.
const BAR_COLUMNS: usize = 20;
/// Load in percent from which on a bar is red.
const HIGH_LOAD: f64 = 90.0;
/// Load in percent from which on a bar is yellow.
const RAISED_LOAD: f64 = 70.0;
/// Most lines about moves and decisions.
const MOVES_MAX: u16 = 10;
/// Rows of a table besides those of its entries: borders and heading.
const TABLE_FRAME_ROWS: u16 = 3;
const KEYS: &str = "up/down choose  m move  i pin  d drain  u undrain  b balance  p plan  q quit";

/// Draws the screen of `holdfast top` into a terminal frame.
pub fn draw(frame: &mut Frame<'_>, snapshot: &Snapshot, keyboard: &Keyboard) {
    let area = frame.area();
    render(area, frame.buffer_mut(), snapshot, Some(keyboard));
}

/// Returns the screen of `holdfast top` as text, with as many lines as there are entries.
pub fn text(snapshot: &Snapshot, columns: u16) -> String {
    let rows = |entries: usize| u16::try_from(entries).unwrap_or(u16::MAX / 8);
    let entries = rows(snapshot.nodes.len() + snapshot.balance.processes.len().max(1));
    let moves = rows(move_lines(snapshot).len()).clamp(1, MOVES_MAX);
    let height = 2 + entries + moves + 2 * TABLE_FRAME_ROWS + 2;
    let area = Rect::new(0, 0, columns, height);
    let mut buffer = Buffer::empty(area);
    render(area, &mut buffer, snapshot, None);
    let line = |y: u16| {
        let symbols = (0..columns).map(|x| buffer[(x, y)].symbol());
        symbols.collect::<String>().trim_end().to_owned() + "\n"
    };
    (0..height).map(line).collect()
}

fn render(area: Rect, buffer: &mut Buffer, snapshot: &Snapshot, keyboard: Option<&Keyboard>) {
    let rows = |entries: usize| u16::try_from(entries).unwrap_or(u16::MAX);
    let moves = move_lines(snapshot);
    let dialogue_rows = if keyboard.is_some() { 2 } else { 0 };
    let parts = Layout::vertical([
        Constraint::Length(2),
        Constraint::Max(rows(snapshot.nodes.len()).saturating_add(TABLE_FRAME_ROWS)),
        Constraint::Min(TABLE_FRAME_ROWS + 1),
        Constraint::Length(rows(moves.len()).clamp(1, MOVES_MAX) + 2),
        Constraint::Length(dialogue_rows),
    ]);
    let [title, nodes, processes, moves_area, dialogue] = parts.areas(area);
    Paragraph::new(title_lines(snapshot)).render(title, buffer);
    Widget::render(node_table(snapshot), nodes, buffer);
    let chosen = keyboard.and_then(Keyboard::chosen);
    let mut entries = snapshot.balance.processes.iter();
    let mut state =
        TableState::new().with_selected(entries.position(|process| Some(process.pid) == chosen));
    StatefulWidget::render(process_table(snapshot), processes, buffer, &mut state);
    let lines: Vec<Line<'_>> = match moves.is_empty() {
        true => vec![Line::from("none")],
        false => moves.into_iter().map(Line::from).collect(),
    };
    Paragraph::new(lines)
        .block(block("moves from this node, and decisions"))
        .render(moves_area, buffer);
    if let Some(keyboard) = keyboard {
        let line = Line::from(keyboard.line()).style(Style::new().fg(Color::Yellow));
        let keys = Line::from(KEYS).style(Style::new().add_modifier(Modifier::DIM));
        Paragraph::new(vec![line, keys]).render(dialogue, buffer);
    }
}

fn block(title: &str) -> Block<'_> {
    Block::new()
        .borders(Borders::ALL)
        .title(format!(" {title} "))
}

fn title_lines(snapshot: &Snapshot) -> Vec<Line<'static>> {
    let (status, balance) = (&snapshot.status, &snapshot.balance);
    let average = balance.average_percent;
    let average = average.map_or_else(String::new, |load| format!(", average load {load:.1} %"));
    let first = format!(
        "node {} of group {}, contact node {}; balancing {}{average}",
        status.node,
        status.group,
        status.contact_node,
        if balance.on { "on" } else { "off" },
    );
    let flows = &status.flows;
    let mut second = format!(
        "flows here: {} owned, {} in transit, {} moved away",
        flows.owned, flows.transit, flows.moved
    );
    if let Some(load) = &snapshot.load.load {
        second += &format!(
            "; CPU {:.2} of {:.2}, waiting {:.1} %, memory free {} MiB, in {} kB/s, out {} kB/s",
            f64::from(load.cpu_millis) / 1e3,
            f64::from(load.capacity_millis) / 1e3,
            f64::from(load.waiting_millis) / 10.0,
            load.memory_free_kib / 1_024,
            load.received_bytes_s / 1_000,
            load.sent_bytes_s / 1_000,
        );
    }
    let bold = Style::new().add_modifier(Modifier::BOLD);
    vec![Line::from(first).style(bold), Line::from(second)]
}

fn node_table(snapshot: &Snapshot) -> Table<'_> {
    let loads = &snapshot.balance.nodes;
    let row = |node: &NodeEntry| {
        let load = loads.iter().find(|load| load.name == node.name);
        let problem = node.problem.clone().unwrap_or_default();
        let state = match (node.this_node, node.connected) {
            (true, _) => "this node".to_owned(),
            (false, true) if problem.is_empty() => "connected".to_owned(),
            (false, true) => format!("connected, {problem}"),
            (false, false) => format!("not connected: {problem}"),
        };
        let role = match (&node.role, node.contact_node) {
            (Some(role), _) => role.clone(),
            (None, true) => "contact node".to_owned(),
            (None, false) => "server node".to_owned(),
        };
        let color = match load.map(|load| load.load_percent) {
            _ if !node.connected => Color::DarkGray,
            Some(load) if load >= HIGH_LOAD => Color::Red,
            Some(load) if load >= RAISED_LOAD => Color::Yellow,
            _ => Color::Reset,
        };
        let flows = node
            .flows
            .map_or_else(String::new, |flows| flows.to_string());
        let cells = [
            node.name.clone(),
            role,
            load.map_or_else(String::new, load_text),
            flows,
            takes_text(load).to_owned(),
            state,
        ];
        Row::new(cells).style(Style::new().fg(color))
    };
    let widths = [
        Constraint::Length(12),
        Constraint::Length(12),
        Constraint::Length(BAR_COLUMNS as u16 + 9),
        Constraint::Length(8),
        Constraint::Length(13),
        Constraint::Min(10),
    ];
    let heading = ["node", "role", "load", "flows", "processes", "connection"];
    Table::new(snapshot.nodes.iter().map(row), widths)
        .header(heading_row(heading))
        .block(block("nodes"))
}

fn heading_row<const N: usize>(names: [&'static str; N]) -> Row<'static> {
    Row::new(names).style(Style::new().add_modifier(Modifier::BOLD))
}

/// Returns whether a node takes processes.
fn takes_text(load: Option<&KnownNodeLoad>) -> &'static str {
    match load {
        None => "unknown",
        Some(load) if load.is_open => "takes",
        Some(_) => "draining",
    }
}

/// Returns a bar and a number for a load.
fn load_text(load: &KnownNodeLoad) -> String {
    let full = (load.load_percent.clamp(0.0, 100.0) / 100.0 * BAR_COLUMNS as f64).round() as usize;
    let rest = BAR_COLUMNS - full;
    format!(
        "{}{} {:5.1} %",
        "#".repeat(full),
        ".".repeat(rest),
        load.load_percent
    )
}

/// Returns the reason for which a process stays, if there is one.
fn stay_text(process: &ManagedProcessEntry) -> String {
    match (process.pinned, &process.blocked) {
        (_, Some(reason)) => reason.clone(),
        (true, None) => "it is pinned to this node".to_owned(),
        (false, None) => String::new(),
    }
}

fn process_table(snapshot: &Snapshot) -> Table<'_> {
    let clients = |pid: i32| {
        let mut loads = snapshot.load.processes.iter();
        loads.find(|load| load.pid == pid)?.clients
    };
    let rows = snapshot.balance.processes.iter().map(|process| {
        let clients = clients(process.pid).map_or_else(String::new, |number| number.to_string());
        Row::new([
            process.pid.to_string(),
            process.name.clone(),
            format!("{:.2}", f64::from(process.used) / 1e3),
            format!("{:.1}", process.memory_kib as f64 / 1_024.0),
            clients,
            if process.has_moved_here { "yes" } else { "no" }.to_owned(),
            stay_text(process),
        ])
    });
    let widths = [
        Constraint::Length(8),
        Constraint::Length(16),
        Constraint::Length(6),
        Constraint::Length(10),
        Constraint::Length(8),
        Constraint::Length(10),
        Constraint::Min(10),
    ];
    let heading = [
        "pid",
        "process",
        "CPU",
        "memory MiB",
        "clients",
        "moved here",
        "cannot move because",
    ];
    Table::new(rows, widths)
        .header(heading_row(heading))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
        .block(block("processes of this node that serve the group"))
}

/// Returns the lines about the drain, moves and decisions.
fn move_lines(snapshot: &Snapshot) -> Vec<String> {
    let drain = &snapshot.drain;
    let drain_line = match drain.state {
        DrainState::Off => None,
        DrainState::Draining => Some(format!(
            "this node is being drained: {} processes moved, {} left (about {:.0} s), {} cannot move{}",
            drain.moved,
            drain.remaining,
            drain.estimate_s,
            drain.stuck.len(),
            drain
                .waiting
                .as_ref()
                .map_or_else(String::new, |why| format!("; waiting: {why}")),
        )),
        DrainState::Ended => Some(match drain.safe_to_reboot {
            true => "this node is drained: safe to reboot".to_owned(),
            false => {
                "this node is drained, and not safe to reboot: `holdfast drain` says why".to_owned()
            }
        }),
    };
    let decisions = snapshot.decisions.records.iter().rev().take(3);
    let decisions = decisions.map(|one| {
        format!(
            "{} s ago: {} {} {} {} ({}): {}",
            one.age_s,
            one.role,
            one.name,
            if one.role == "takes" { "from" } else { "to" },
            one.peer,
            one.purpose,
            one.outcome
        )
    });
    drain_line
        .into_iter()
        .chain(snapshot.moves())
        .chain(decisions)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::snapshot::tests::snapshot;
    use super::*;
    use holdfast_api::control::DrainReport;

    #[test]
    fn text_has_nodes_processes_and_moves() {
        let mut snapshot = snapshot();
        snapshot.drain = DrainReport {
            state: DrainState::Draining,
            moved: 1,
            remaining: 2,
            estimate_s: 3.0,
            ..DrainReport::default()
        };
        let text = text(&snapshot, 120);
        for expected in [
            "node n1 of group g, contact node n1; balancing off, average load 40.0 %",
            "#############....... ",
            " 65.0 %",
            "draining",
            "not connected: no answer",
            "game",
            "its other end is outside",
            "this node is being drained: 1 processes moved, 2 left (about 3 s), 0 cannot move",
            "game (40) moved to n2, frozen 5.0 ms",
            "4 s ago: gives game to n2 (drain): moved",
        ] {
            assert!(text.contains(expected), "{expected:?} in:\n{text}");
        }
        assert!(text.lines().all(|line| line.chars().count() <= 120));
    }

    #[test]
    fn small_terminal_is_no_problem() {
        for (columns, rows) in [(1, 1), (10, 3), (40, 12), (200, 80)] {
            let area = Rect::new(0, 0, columns, rows);
            let mut buffer = Buffer::empty(area);
            render(area, &mut buffer, &snapshot(), Some(&Keyboard::default()));
        }
    }
}
