//! A session with a MariaDB or MySQL server: the part of its protocol that a few queries need.
//!
//! <https://mariadb.com/kb/en/clientserver-protocol/>

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::status::{Counts, add};

/// Capability flags: protocol 4.1, secure connection, named authentication methods, transaction states.
const CAPABILITIES: u32 = 0x0000_0200 | 0x0000_8000 | 0x0008_0000 | 0x0000_2000;
const COM_QUERY: u8 = 3;
const ERR_PACKET: u8 = 0xff;
const EOF_PACKET: u8 = 0xfe;
/// Maximum time for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// A session with the server.
pub struct Session {
    stream: TcpStream,
}

impl Session {
    /// Opens a session as a user without a password, with a table that ends with the session.
    pub fn open(address: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        let mut session = Self { stream };
        let greeting = session.receive()?;
        ensure!(
            greeting.0.first() == Some(&10),
            "the greeting does not have protocol version 10"
        );
        let mut answer = CAPABILITIES.to_le_bytes().to_vec();
        answer.extend((1u32 << 24).to_le_bytes());
        // UTF-8, and reserved bytes.
        answer.push(33);
        answer.extend([0; 23]);
        answer.extend(b"zone\0");
        // No password.
        answer.push(0);
        answer.extend(b"mysql_native_password\0");
        session.send(greeting.1.wrapping_add(1), &answer)?;
        session.receive_ok()?;
        for statement in [
            "CREATE DATABASE IF NOT EXISTS world",
            "CREATE TEMPORARY TABLE world.zone (turn BIGINT, connections BIGINT)",
            "INSERT INTO world.zone VALUES (0, 0)",
        ] {
            session.execute(statement)?;
        }
        Ok(session)
    }

    /// Changes the table and reads it, forever: the turn must be the next one, which only this very session knows. On
    /// an error, prints it and ends without opening another session.
    pub fn run_transactions(mut self, pause: Duration, counts: &Counts) {
        for turn in 1.. {
            let connections = counts
                .connections
                .load(std::sync::atomic::Ordering::Relaxed);
            match self.transaction(turn, connections) {
                Ok(()) => add(&counts.queries, 1),
                Err(error) => {
                    eprintln!("zone: the database session failed: {error:#}");
                    return add(&counts.query_errors, 1);
                }
            }
            sleep(pause);
        }
    }

    fn transaction(&mut self, turn: u64, connections: u64) -> Result<()> {
        let update = "UPDATE world.zone SET turn = turn + 1, connections =";
        self.execute(&format!("{update} {connections}"))?;
        let row = self.query_row("SELECT turn, connections FROM world.zone")?;
        let expected = [turn.to_string(), connections.to_string()];
        ensure!(
            row == expected,
            "the table has {row:?} instead of {expected:?}"
        );
        Ok(())
    }

    fn execute(&mut self, statement: &str) -> Result<()> {
        self.send_query(statement)?;
        self.receive_ok().with_context(|| statement.to_owned())
    }

    /// Returns the texts of the only row of an answer.
    fn query_row(&mut self, query: &str) -> Result<Vec<String>> {
        self.send_query(query)?;
        let columns = usize::from(
            *self
                .receive_answer()?
                .first()
                .context("the database sent an empty packet")?,
        );
        // Skip the definitions of the columns.
        for _ in 0..columns {
            self.receive_answer()?;
        }
        ensure!(
            is_end(&self.receive_answer()?),
            "the column definitions have no end packet"
        );
        let row = self.receive_answer()?;
        ensure!(
            is_end(&self.receive_answer()?),
            "the query returned more than one row"
        );
        decode_texts(&row).context("the row is truncated")
    }

    fn send_query(&mut self, query: &str) -> Result<()> {
        self.send(0, &[&[COM_QUERY], query.as_bytes()].concat())
    }

    /// Waits for an OK packet.
    fn receive_ok(&mut self) -> Result<()> {
        match self.receive_answer()?.first() {
            Some(0) => Ok(()),
            other => bail!("{other:?} instead of an OK packet"),
        }
    }

    /// Receives a packet that is not an error.
    fn receive_answer(&mut self) -> Result<Vec<u8>> {
        let (packet, _) = self.receive()?;
        if packet.first() == Some(&ERR_PACKET) {
            bail!(
                "{}",
                String::from_utf8_lossy(packet.get(3..).unwrap_or_default())
            );
        }
        Ok(packet)
    }

    /// Receives a packet and its number.
    fn receive(&mut self) -> Result<(Vec<u8>, u8)> {
        let mut head = [0; 4];
        self.stream.read_exact(&mut head)?;
        let [a, b, c, number] = head;
        let mut packet = vec![0; u32::from_le_bytes([a, b, c, 0]) as usize];
        self.stream.read_exact(&mut packet)?;
        Ok((packet, number))
    }

    fn send(&mut self, number: u8, packet: &[u8]) -> Result<()> {
        let [a, b, c, _] = (packet.len() as u32).to_le_bytes();
        let framed = [&[a, b, c, number], packet].concat();
        Ok(self.stream.write_all(&framed)?)
    }
}

fn is_end(packet: &[u8]) -> bool {
    packet.first() == Some(&EOF_PACKET) && packet.len() < 9
}

/// Decodes texts of less than 251 bytes each.
fn decode_texts(mut row: &[u8]) -> Option<Vec<String>> {
    let mut decoded = Vec::new();
    while let Some((length, rest)) = row.split_first() {
        let (text, behind) = rest.split_at_checked(usize::from(*length))?;
        decoded.push(String::from_utf8_lossy(text).into_owned());
        row = behind;
    }
    Some(decoded)
}
