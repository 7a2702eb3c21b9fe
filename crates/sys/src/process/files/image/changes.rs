//! What an image has that an earlier one of the same tree has not: all that must cross in the freeze.

use super::limits::{self, Malformed};
use super::{Content, FileId, Image, ObjectId, OpenFile, Pipe, Slot, Table, Terminal};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::mem::discriminant;

/// The way from one image to a later one of the same tree.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changes {
    tables: Part<u32, TableChanges>,
    files: Part<FileId, OpenFile>,
    pipes: Part<ObjectId, Pipe>,
    terminals: Part<ObjectId, Terminal>,
    contents: Part<ObjectId, ContentChanges>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Part<K: Ord, T> {
    set: BTreeMap<K, T>,
    gone: BTreeSet<K>,
}

impl<K: Ord, T> Default for Part<K, T> {
    fn default() -> Self {
        Self {
            set: BTreeMap::new(),
            gone: BTreeSet::new(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct TableChanges {
    pids: BTreeSet<i32>,
    slots: Part<u32, Slot>,
    descriptors_max: (u64, u64),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ContentChanges {
    /// Its chunks are left out.
    head: Content,
    chunks: Part<u64, super::Bytes>,
}

impl Image {
    /// What leads from `before` to this image.
    #[must_use]
    pub fn changes_since(&self, before: &Self) -> Changes {
        let empty_table = Table::default();
        let mut tables = part(&before.tables, &self.tables, |_, _| None);
        tables.set = changed(&before.tables, &self.tables)
            .map(|(id, now)| {
                let old = before.tables.get(id).unwrap_or(&empty_table);
                let slots = part(&old.slots, &now.slots, |_, slot| Some(*slot));
                let changes = TableChanges {
                    pids: now.pids.clone(),
                    slots,
                    descriptors_max: now.descriptors_max,
                };
                (*id, changes)
            })
            .collect();
        Changes {
            tables,
            files: part(&before.files, &self.files, |_, now| Some(now.clone())),
            ..self.changes_of_objects(before)
        }
    }

    /// What leads from `before` to a tree that has the same descriptors of the same open files. This image is of all its pipes,
    /// terminals and contents, and of those open files that may have changed or are in flight; `limits` are those of its tables.
    pub(in crate::process::files) fn changes_among(
        self,
        before: &Self,
        limits: &BTreeMap<u32, (u64, u64)>,
    ) -> Changes {
        let objects = self.changes_of_objects(before);
        let tables = before.tables.iter().filter_map(|(id, table)| {
            let descriptors_max = *limits.get(id)?;
            let changes = TableChanges {
                pids: table.pids.clone(),
                slots: Part::default(),
                descriptors_max,
            };
            (table.descriptors_max != descriptors_max).then_some((*id, changes))
        });
        let files = self.files.into_iter();
        let files = files.filter(|(id, now)| before.files.get(id) != Some(now));
        Changes {
            tables: Part {
                set: tables.collect(),
                gone: BTreeSet::new(),
            },
            files: Part {
                set: files.collect(),
                gone: BTreeSet::new(),
            },
            ..objects
        }
    }

    /// Those of all that open files share.
    fn changes_of_objects(&self, before: &Self) -> Changes {
        let mut contents = part(&before.contents, &self.contents, |_, _| None);
        contents.set = changed(&before.contents, &self.contents)
            .map(|(id, now)| (*id, content_changes(before.contents.get(id), now)))
            .collect();
        Changes {
            contents,
            pipes: part(&before.pipes, &self.pipes, |_, now| Some(now.clone())),
            terminals: part(&before.terminals, &self.terminals, |_, now| {
                Some(now.clone())
            }),
            ..Changes::default()
        }
    }

    /// Brings this image to where `changes` lead. What they leave alone costs nothing.
    ///
    /// # Errors
    /// [`Malformed`] when the outcome contradicts itself or exceeds the limits: the image is of no use then.
    pub fn apply(&mut self, changes: Changes) -> Result<Former, Malformed> {
        let known = changes.concern_files_alone(self);
        let Changes {
            tables,
            files,
            pipes,
            terminals,
            contents,
        } = changes;
        for id in &tables.gone {
            self.tables.remove(id);
        }
        for (id, change) in tables.set {
            let table = self.tables.entry(id).or_default();
            table.pids = change.pids;
            table.descriptors_max = change.descriptors_max;
            change.slots.apply(&mut table.slots);
        }
        let mut former = Former::default();
        for id in contents.gone {
            former.contents.insert(id, self.contents.remove(&id));
        }
        for (id, change) in contents.set {
            let old = self.contents.remove(&id);
            let mut chunks = old
                .as_ref()
                .map_or_else(BTreeMap::new, |old| old.chunks.clone());
            change.chunks.apply(&mut chunks);
            let content = Content {
                chunks,
                ..change.head
            };
            self.contents.insert(id, content);
            former.contents.entry(id).or_insert(old);
        }
        for id in files.gone {
            former.files.insert(id, self.files.remove(&id));
        }
        for (id, file) in files.set {
            let old = self.files.insert(id, file);
            former.files.entry(id).or_insert(old);
        }
        pipes.apply(&mut self.pipes);
        terminals.apply(&mut self.terminals);
        match known {
            true => limits::check_files(self, former.files.keys())?,
            false => limits::check(self)?,
        }
        Ok(former)
    }
}

/// What of an image can be judged by itself: all of it, or what changed.
#[derive(Debug)]
pub(in crate::process) struct Parts<'a> {
    /// `RLIMIT_NOFILE` of tables, soft and hard.
    pub limits: Vec<(u64, u64)>,
    /// Open files.
    pub files: Vec<&'a OpenFile>,
    /// Pipes and FIFOs.
    pub pipes: Vec<&'a Pipe>,
    /// Terminals.
    pub terminals: Vec<&'a Terminal>,
    /// Contents; of changes without their chunks.
    pub contents: Vec<&'a Content>,
}

impl Image {
    /// All parts.
    pub(in crate::process) fn parts(&self) -> Parts<'_> {
        let Self {
            tables,
            files,
            pipes,
            terminals,
            contents,
        } = self;
        // Numbers lead to open files, and to processes of the tree.
        let limit = |table: &Table| {
            let Table {
                pids: _,
                slots: _,
                descriptors_max,
            } = table;
            *descriptors_max
        };
        Parts {
            limits: tables.values().map(limit).collect(),
            files: files.values().collect(),
            pipes: pipes.values().collect(),
            terminals: terminals.values().collect(),
            contents: contents.values().collect(),
        }
    }
}

impl Changes {
    /// All parts that are new or others than before.
    pub(in crate::process) fn parts(&self) -> Parts<'_> {
        let Self {
            tables,
            files,
            pipes,
            terminals,
            contents,
        } = self;
        let limit = |table: &TableChanges| {
            let TableChanges {
                pids: _,
                slots: _,
                descriptors_max,
            } = table;
            *descriptors_max
        };
        Parts {
            limits: tables.set.values().map(limit).collect(),
            files: files.set.values().collect(),
            pipes: pipes.set.values().collect(),
            terminals: terminals.set.values().collect(),
            contents: contents.set.values().map(ContentChanges::judged).collect(),
        }
    }
}

impl ContentChanges {
    fn judged(&self) -> &Content {
        // Chunks are bytes of the tree's own.
        let Self { head, chunks: _ } = self;
        head
    }
}

/// What an image was where [`Image::apply`] has changed it; nothing where there was nothing.
#[derive(Debug, Default)]
pub struct Former {
    /// Open files.
    pub files: BTreeMap<FileId, Option<OpenFile>>,
    /// Contents.
    pub contents: BTreeMap<ObjectId, Option<Content>>,
}

impl Former {
    /// An open file as it was, which is `now` so.
    pub fn file<'a>(&'a self, id: FileId, now: &'a OpenFile) -> Option<&'a OpenFile> {
        self.files.get(&id).map_or(Some(now), Option::as_ref)
    }

    /// The same of content.
    pub fn content<'a>(&'a self, id: ObjectId, now: &'a Content) -> Option<&'a Content> {
        self.contents.get(&id).map_or(Some(now), Option::as_ref)
    }
}

impl Changes {
    /// Reads changes that came from another node; [`Image::apply`] checks what they lead to.
    ///
    /// # Errors
    /// [`Malformed`] for bytes that are no changes.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        Ok(postcard::from_bytes(bytes)?)
    }

    /// Whether they are of open files alone, which the image has and which stay what they are: whatever refers to one is right
    /// still.
    fn concern_files_alone(&self, image: &Image) -> bool {
        let of_a_kind = |(id, new): (&FileId, &OpenFile)| {
            let old = image.files.get(id);
            old.is_some_and(|old| discriminant(&old.kind) == discriminant(&new.kind))
        };
        !self.concern_tables()
            && self.pipes.is_nothing()
            && self.terminals.is_nothing()
            && self.contents.is_nothing()
            && self.files.gone.is_empty()
            && self.files.set.iter().all(of_a_kind)
    }

    /// Open files that are new or others than before.
    pub fn files(&self) -> impl Iterator<Item = &OpenFile> {
        self.files.set.values()
    }

    /// Whether any table has something else at a number, or other processes.
    #[must_use]
    pub fn concern_tables(&self) -> bool {
        !self.tables.is_nothing()
    }
}

impl<K: Ord, T> Part<K, T> {
    fn is_nothing(&self) -> bool {
        self.set.is_empty() && self.gone.is_empty()
    }

    fn apply(self, map: &mut BTreeMap<K, T>) {
        for key in &self.gone {
            map.remove(key);
        }
        map.extend(self.set);
    }
}

/// Entries of `now` that `before` has not, or has otherwise.
fn changed<'a, K: Ord, T: PartialEq>(
    before: &'a BTreeMap<K, T>,
    now: &'a BTreeMap<K, T>,
) -> impl Iterator<Item = (&'a K, &'a T)> {
    now.iter()
        .filter(|(key, value)| before.get(key) != Some(*value))
}

fn part<K: Ord + Copy, T: PartialEq, C>(
    before: &BTreeMap<K, T>,
    now: &BTreeMap<K, T>,
    change: impl Fn(&K, &T) -> Option<C>,
) -> Part<K, C> {
    let set = changed(before, now).filter_map(|(key, value)| Some((*key, change(key, value)?)));
    Part {
        set: set.collect(),
        gone: before
            .keys()
            .filter(|key| !now.contains_key(key))
            .copied()
            .collect(),
    }
}

fn content_changes(before: Option<&Content>, now: &Content) -> ContentChanges {
    let none = BTreeMap::new();
    let old = before.map_or(&none, |content| &content.chunks);
    ContentChanges {
        head: Content {
            form: now.form.clone(),
            access: now.access,
            times_ns: now.times_ns,
            size: now.size,
            elsewhere: now.elsewhere,
            chunks: BTreeMap::new(),
        },
        chunks: part(old, &now.chunks, |_, bytes| Some(bytes.clone())),
    }
}
