//! A single read of a tree: saves each open file once, including files found in flight on the way.

use super::beside::{descriptors_max, has_owner, owner};
use super::outside::Outside;
use super::{Address, Copier, Draft, Known, Limits, Subject, inet};
use crate::process::files::error::{At, Blocker, FilesError, Reason};
use crate::process::files::fdinfo::FdInfo;
use crate::process::files::image::{FileId, Image, Kind, ObjectId, OpenFile, Slot, Table};
use crate::process::files::survey::{Place, Pool, Survey, key, own_info, status_inner_pid};
use crate::process::files::{kinds, lock_risks};
use crate::process::procfs::Stat;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// Reason why an open file was not saved.
#[derive(Debug)]
pub enum Stop {
    /// The file cannot move.
    Reason(Reason),
    /// The kernel refused a step.
    Failed(FilesError),
}

impl From<Reason> for Stop {
    fn from(reason: Reason) -> Self {
        Self::Reason(reason)
    }
}

impl From<FilesError> for Stop {
    fn from(error: FilesError) -> Self {
        Self::Failed(error)
    }
}

/// Result of reading a running tree.
#[derive(Debug)]
pub struct Half {
    pub image: Image,
    pub known: Known,
    pub inet: inet::Found,
    /// Descriptors that could not move at that moment.
    pub blockers: Vec<Blocker>,
    /// The first step that the kernel refused.
    pub failed: Option<FilesError>,
}

/// State of the tree while it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The tree runs.
    Running,
    /// The tree is stopped.
    Frozen,
}

/// Result of saving a part of an open file.
pub type Saved<T> = Result<T, Stop>;

/// Reader of a tree's open files.
#[derive(Debug)]
pub struct Saver<'a> {
    /// Limits of saving.
    pub limits: Limits,
    /// True if the tree is stopped, so that data for its descriptors can be read completely.
    pub frozen: bool,
    /// All open files.
    pub pool: Pool,
    /// Image built from the open files.
    pub image: Image,
    /// Files held by processes outside the tree.
    pub outside: Outside,
    /// The kernel's list of Unix sockets, once it was queried.
    pub unix: Option<kinds::unix::Listed>,
    /// Pipes with an open end that was not found yet: class, and text in `/proc/PID/fd`.
    pub half_pipes: Vec<(usize, String)>,
    /// The tree's PIDs as the caller sees them.
    pub pids: Vec<i32>,
    /// TCP and UDP sockets found.
    pub inet: inet::Found,
    /// First step that the kernel refused while the tree ran: the file concerned is left out.
    failed: Option<FilesError>,
    /// Descriptor tables in which the open files were found.
    pub(super) survey: Survey,
    /// Numbers of the first open files in the pool.
    pub(super) ids: Vec<FileId>,
    draft: Option<&'a Draft>,
    taken: HashSet<FileId>,
    next_file: FileId,
    objects: HashMap<(u32, u64), ObjectId>,
    sets: BTreeSet<Address>,
    next_object: ObjectId,
    copier: Copier,
}

impl<'a> Saver<'a> {
    /// Creates a saver for the descriptors of a survey.
    pub fn new(
        pids: &[i32],
        survey: Survey,
        limits: &Limits,
        draft: Option<&'a Draft>,
        stage: Stage,
    ) -> Self {
        let pool = Pool::new(&survey);
        Self::numbered(pids, (survey, pool, Vec::new()), limits, draft, stage)
    }

    /// Creates a saver for descriptors that are grouped already; `ids` are the numbers of the first open files.
    pub(super) fn numbered(
        pids: &[i32],
        (survey, pool, ids): (Survey, Pool, Vec<FileId>),
        limits: &Limits,
        draft: Option<&'a Draft>,
        stage: Stage,
    ) -> Self {
        let (frozen, outside) = match stage {
            Stage::Frozen => (true, Outside::default()),
            Stage::Running => (false, Outside::look(pids)),
        };
        let known = draft.map(|draft| &draft.known);
        let next = |numbers: Option<u32>| numbers.map_or(0, |last| last + 1);
        Self {
            limits: limits.clone(),
            frozen,
            pool,
            image: Image::default(),
            outside,
            unix: None,
            half_pipes: Vec::new(),
            pids: pids.to_vec(),
            inet: inet::Found::default(),
            failed: None,
            survey,
            ids,
            draft,
            taken: HashSet::new(),
            next_file: next(draft.and_then(|draft| draft.image.files.keys().next_back().copied())),
            objects: known.map(|known| known.objects.clone()).unwrap_or_default(),
            sets: BTreeSet::new(),
            next_object: next(known.and_then(|known| known.objects.values().max().copied())),
            copier: Copier::default(),
        }
    }

    /// Saves everything.
    pub fn run(mut self) -> Result<(Image, Known, inet::Found), FilesError> {
        self.number_all();
        self.save(&[], 0)?;
        let known = self.fill_tables()?;
        Ok((self.image, known, self.inet))
    }

    /// Saves the movable files of a running tree. The others are left out together with everything that refers to them,
    /// and are reported.
    pub fn run_half(mut self) -> Result<Half, FilesError> {
        self.number_all();
        let blockers = self.save_all(&[], 0)?;
        self.image.drop_dangling();
        let known = self.fill_tables()?;
        // Tables of processes that have ended are left out, so their locks must go too.
        self.image.drop_dangling();
        let files = &self.image.files;
        self.inet.fixed.retain(|id, _| files.contains_key(id));
        self.inet.places.retain(|id, _| files.contains_key(id));
        Ok(Half {
            image: self.image,
            known,
            inet: self.inet,
            blockers,
            failed: self.failed,
        })
    }

    /// Saves these open files, and all from index `others` on: files in flight are found on the way and appended.
    pub(super) fn save(&mut self, these: &[usize], others: usize) -> Result<(), FilesError> {
        let blockers = self.save_all(these, others)?;
        if blockers.is_empty() {
            return Ok(());
        }
        Err(FilesError::Blocked(blockers))
    }

    fn save_all(&mut self, these: &[usize], others: usize) -> Result<Vec<Blocker>, FilesError> {
        let mut blockers = Vec::new();
        for class in these {
            self.save_one(*class, &mut blockers)?;
        }
        let mut class = others;
        while class < self.pool.classes.len() {
            self.save_one(class, &mut blockers)?;
            class += 1;
        }
        for (class, link) in kinds::pipe::half(self) {
            blockers.push(self.blocker(class, link, Reason::OtherEndOutside(None)));
        }
        Ok(blockers)
    }

    fn save_one(&mut self, class: usize, blockers: &mut Vec<Blocker>) -> Result<(), FilesError> {
        let mut link = String::new();
        match self.save_class(class, &mut link) {
            Ok(Some(file)) => {
                self.image.files.insert(self.ids[class], file);
            }
            Ok(None) => {}
            Err(Stop::Failed(error)) if self.frozen => return Err(error),
            // Usually the file was closed, or the number was reused, during the read.
            Err(Stop::Failed(error)) => drop(self.failed.get_or_insert(error)),
            Err(Stop::Reason(reason)) => blockers.push(self.blocker(class, link, reason)),
        }
        Ok(())
    }

    /// Returns the number of an open file of the tree.
    pub fn id(&self, class: usize) -> FileId {
        self.ids[class]
    }

    /// Returns the number of an open file in flight; it is saved after the open files in descriptor tables.
    pub fn id_in_flight(&mut self, copy: OwnedFd) -> Result<FileId, FilesError> {
        let info = own_info(&copy).at("/proc/self/fdinfo")?;
        let class = self.pool.add(Place::Own(copy), &info);
        self.number_all();
        Ok(self.ids[class])
    }

    /// Returns the number of a pipe or content.
    pub fn object(&mut self, info: &FdInfo) -> ObjectId {
        let next = &mut self.next_object;
        *self
            .objects
            .entry((info.mount, info.inode))
            .or_insert_with(|| {
                *next += 1;
                *next - 1
            })
    }

    /// Returns the PID that a process of the tree sees for itself, or `None` for other processes. A zombie has no
    /// descriptors, and moves with its parent.
    pub fn inner(&self, pid: i32) -> Option<i32> {
        let holders = self.survey.values().flat_map(|table| &table.holders);
        let found = holders.into_iter().find(|holder| holder.pid == pid);
        let zombie = || {
            let stat = Stat::read(pid).ok()?;
            let is_ours = stat.state == 'Z' && self.pids.contains(&stat.parent);
            is_ours.then(|| status_inner_pid(pid))?
        };
        found.map(|holder| holder.inner).or_else(zombie)
    }

    fn number_all(&mut self) {
        for class in self.ids.len()..self.pool.classes.len() {
            let known = self.known_id(class).filter(|id| !self.taken.contains(id));
            let id = known.unwrap_or_else(|| {
                self.next_file += 1;
                self.next_file - 1
            });
            self.taken.insert(id);
            self.ids.push(id);
        }
    }

    fn known_id(&self, class: usize) -> Option<FileId> {
        let known = &self.draft?.known;
        let class = &self.pool.classes[class];
        let key = key(&class.info);
        class.slots.iter().find_map(|slot| {
            let (before, id) = known.files.get(slot)?;
            (*before == key).then_some(*id)
        })
    }

    /// Saves an open file; `None` for a descriptor that a running process closed meanwhile.
    fn save_class(&mut self, class: usize, link: &mut String) -> Saved<Option<OpenFile>> {
        let id = self.ids[class];
        let before = self.draft.and_then(|draft| draft.image.files.get(&id));
        let unchanged = inet::unchanged(&self.pool.classes[class].info, before);
        let unchanged = unchanged.filter(|_| self.frozen);
        if unchanged.is_some() && self.pool.classes[class].listed && self.inet.seen.contains(&id) {
            self.note_place(class);
            return Ok(unchanged);
        }
        let Some(copy) = self.copy(class)? else {
            return Ok(None);
        };
        // Without a listing, it is unknown yet if the file has an owner for its signals.
        let tells_nobody = || -> Result<bool, FilesError> {
            Ok(self.pool.classes[class].listed || !has_owner(copy.as_fd())?)
        };
        if unchanged.is_some() && tells_nobody()? {
            let known = self.draft.and_then(|draft| draft.sockets.get(&id));
            let known = known.map(|known| &**known);
            self.note_place(class);
            self.inet.hold(id, copy, known)?;
            return Ok(unchanged);
        }
        let info = self.pool.classes[class].info.clone();
        let before = before.cloned();
        let path = format!("/proc/self/fd/{}", copy.as_raw_fd());
        let target = fs::read_link(&path).at(&path)?;
        *link = target.to_string_lossy().into_owned();
        let subject = Subject {
            copy,
            link: link.clone(),
            path: target.into(),
            info,
            class,
            before,
        };
        let locks = self.locks(&subject)?;
        let owner = owner(self, &subject)?;
        let kind = kinds::save(self, &subject)?;
        let place = self.pool.classes[class].place.address();
        if let Some(pid) = self.outside.sharer(&subject.link, place) {
            return Err(Reason::HeldOutside(pid).into());
        }
        let flags = subject.info.flags;
        if let (Kind::Epoll { .. }, Place::Process(pid, fd)) =
            (&kind, &self.pool.classes[class].place)
        {
            self.sets.insert((*pid, *fd));
        }
        if matches!(kind, Kind::Inet { .. }) {
            self.note_place(class);
            if self.frozen {
                self.inet.hold(id, subject.copy, None)?;
            } else {
                self.inet.look(id, subject.fd())?;
            }
        }
        Ok(Some(OpenFile {
            flags,
            owner,
            locks,
            kind,
        }))
    }

    fn note_place(&mut self, class: usize) {
        if let Place::Process(pid, fd) = self.pool.classes[class].place {
            self.inet.places.insert(self.ids[class], (pid, fd));
        }
    }

    fn copy(&mut self, class: usize) -> Saved<Option<OwnedFd>> {
        let address = match &self.pool.classes[class].place {
            Place::Own(copy) => return Ok(Some(copy.try_clone().at("dup")?)),
            Place::Process(pid, fd) => (*pid, *fd),
        };
        match self.copier.copy(address) {
            // A running process has closed the descriptor, or has ended.
            Err(error)
                if !self.frozen
                    && matches!(error.raw_os_error(), Some(libc::EBADF | libc::ESRCH)) =>
            {
                Ok(None)
            }
            outcome => {
                let copy = outcome.at("pidfd_getfd")?;
                // The descriptor was closed too, and its number is reused already.
                let other = || -> Result<bool, FilesError> {
                    let found = rustix::fs::fstat(&copy).at("fstat")?;
                    Ok(found.st_ino != self.pool.classes[class].info.inode)
                };
                Ok((self.frozen || !other()?).then_some(copy))
            }
        }
    }

    /// Returns the locks of an open file. `fdinfo` shows a lock only at descriptors of the table, or of the open
    /// file, that took it.
    fn locks(&self, subject: &Subject) -> Saved<Vec<super::super::image::Lock>> {
        let mut locks = Vec::new();
        for (table, fd) in &self.pool.classes[subject.class].slots {
            let descriptors = &self.survey[table].descriptors;
            let Ok(at) = descriptors.binary_search_by_key(fd, |one| one.number) else {
                continue;
            };
            for lock in descriptors[at]
                .info
                .locks(*table)
                .map_err(|_| Reason::Lease)?
            {
                if !locks.contains(&lock) {
                    locks.push(lock);
                }
            }
        }
        let info = &subject.info;
        match lock_risks::risk_everywhere(subject.fd(), info, &locks) {
            Some(reason) => Err(Reason::Lock(reason).into()),
            None => Ok(locks),
        }
    }

    fn fill_tables(&mut self) -> Result<Known, FilesError> {
        let mut known = Known::default();
        for (class, file) in self.pool.classes.iter().zip(&self.ids) {
            if self.image.files.contains_key(file) {
                for slot in &class.slots {
                    known.files.insert(*slot, (key(&class.info), *file));
                }
            }
        }
        for (number, seen) in &self.survey {
            let slots = seen.descriptors.iter().filter_map(|one| {
                let (_, file) = known.files.get(&(*number, one.number))?;
                let slot = Slot {
                    file: *file,
                    close_on_exec: one.info.close_on_exec,
                };
                Some((one.number, slot))
            });
            let table = Table {
                pids: seen.holders.iter().map(|holder| holder.inner).collect(),
                slots: slots.collect(),
                descriptors_max: match descriptors_max(seen.holders[0].pid) {
                    Err(_) if !self.frozen => continue,
                    found => found?,
                },
            };
            self.image.tables.insert(*number, table);
        }
        known.objects = std::mem::take(&mut self.objects);
        known.sets = std::mem::take(&mut self.sets);
        Ok(known)
    }

    fn blocker(&self, class: usize, path: String, reason: Reason) -> Blocker {
        let (pid, fd) = match &self.pool.classes[class].place {
            Place::Process(pid, fd) => (*pid, Some(*fd)),
            Place::Own(_) => (self.pids[0], None),
        };
        Blocker {
            pid,
            fd,
            path,
            reason,
        }
    }
}
