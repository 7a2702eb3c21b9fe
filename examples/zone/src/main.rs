//! The zone server of paper 002 section VI C, as an ordinary program: one thread serves clients with epoll, one holds a
//! session to a database and queries it, one writes to memory. It knows nothing of Holdfast.
#![forbid(unsafe_code)]

mod clients;
mod database;
mod memory;
mod status;

use std::net::SocketAddr;
use std::thread::spawn;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;

/// Sends back what clients send, holds a session to a database, and writes to memory all the while.
#[derive(Parser)]
struct Args {
    /// Where clients connect.
    #[arg(long)]
    listen: SocketAddr,
    /// Where a connection is told what has been done, as one line, and closed.
    #[arg(long)]
    status: SocketAddr,
    /// The database; no session without.
    #[arg(long)]
    database: Option<SocketAddr>,
    /// From one transaction to the next, milliseconds.
    #[arg(long, default_value_t = 50)]
    query_every_ms: u64,
    /// Memory that it holds, MiB.
    #[arg(long, default_value_t = 64)]
    memory_mib: usize,
    /// How much of that it writes, MiB a second, in whole pages of 4 KiB, each a random one that this round has not had.
    #[arg(long, default_value_t = 0)]
    dirty_mib_per_s: u64,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let clients = clients::Clients::listen(args.listen).context("the clients' socket")?;
    // Who has an answer here can connect there.
    let counts = status::serve(args.status).context("the status socket")?;
    let memory = memory::Memory::new(args.memory_mib);
    spawn(move || memory.keep_writing(args.dirty_mib_per_s, counts));
    if let Some(address) = args.database {
        let session = database::Session::open(address).context("the database")?;
        let pause = Duration::from_millis(args.query_every_ms);
        spawn(move || session.keep_asking(pause, counts));
    }
    clients.serve(counts)
}
