-- The functions of a journal on Redis (7.0 or newer) or Valkey.
--
-- Python decides what a change does to a record (streams.journal.records). These functions compare
-- what Python has read with what is stored, and write what Python has computed. They never look
-- into a record, and do no arithmetic with numbers of streams: those may be above 2^53, and Lua has
-- only doubles.
--
-- KEYS[1] of each function is the hash `{prefix}:journal`. All other keys are derived from it, and
-- lie in the same slot of a cluster.

local ABSENT = ''  -- stands for the mark of a stream without a record
local TOLD_BYTES_MAX = 16384  -- of a post whose entry is published, too

local function prefix_of(keys)
  return string.sub(keys[1], 1, -8)  -- without 'journal'
end

-- Keys of one stream, session, replica or turn, by what follows the prefix.
local OF_ONE = {r = true, l = true, g = true, f = true, m = true, s = true, sg = true, t = true}
OF_ONE['in'] = true

-- Call a command on a key. Another program may have written to it: a key of another type is deleted
-- if it is of one stream, session, replica or turn, whose content is lost then. For any other the
-- error names the key, and replicas wait until it is repaired.
local function call(command, key, ...)
  local answer = redis.pcall(command, key, ...)
  if type(answer) ~= 'table' or not answer.err then
    return answer
  end
  local is_type = string.find(answer.err, 'WRONGTYPE', 1, true)
  if is_type and OF_ONE[string.match(key, '}:(%a+):')] then
    redis.log(redis.LOG_WARNING, 'mcp-streams deletes a key of another type: ' .. key)
    redis.call('DEL', key)
    return redis.call(command, key, ...)
  end
  if is_type or string.find(answer.err, 'hash value') or string.find(answer.err, 'overflow') then
    local first = ...
    local field = first and string.sub(command, 1, 1) == 'H' and ' ' .. first or ''
    error({err = 'DAMAGED ' .. key .. field .. ': ' .. answer.err})
  end
  error(answer)
end

-- A number in a hash that all replicas share.
local function number_in(key, field)
  local number = tonumber(call('HGET', key, field) or 0)
  if not number then
    error({err = 'DAMAGED ' .. key .. ' ' .. field .. ': it is no number'})
  end
  return number
end

-- The number of the last commit of a replica: 0, and so all of them are made again, if it is none.
local function last_commit(p, replica)
  local stored = tonumber(call('HGET', p .. 'commits', replica) or 0)
  return stored and stored >= 0 and stored < 2 ^ 52 and stored or 0
end

-- The owner in the mark of a record: 12 bytes of version, then `fence:epoch:owner`.
local function owner_of(mark)
  return string.match(string.sub(mark, 13), '^%d+:%d+:(.*)$')
end

local function mark_of(p, stream)
  return call('HGET', p .. 'r:' .. stream, 'k') or ABSENT
end

local function milliseconds()
  local now = redis.call('TIME')
  return tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
end

local function wake(p, replica, what)
  return redis.call('SPUBLISH', p .. 'c:' .. replica, what)
end

-- Put posts where the owner of their stream receives them.
local function pass_posts(p, owner)
  local inbox = p .. 'in:' .. owner
  local heirs = {}
  for _, entry in ipairs(call('XRANGE', inbox, '-', '+')) do
    local fields = entry[2]  -- 's' or 'd', sender, 'c', count, 't', stream, 'b', body
    local mark = (fields[6] or '') ~= '' and mark_of(p, fields[6]) or ABSENT
    local is_for_owner = fields[1] == 's'  -- and not for this replica, whoever owns the stream
    local heir = is_for_owner and mark ~= ABSENT and owner_of(mark) or nil
    if heir and heir ~= owner then
      call('XADD', p .. 'in:' .. heir, '*', unpack(fields))
      call('XDEL', inbox, entry[1])
      heirs[heir] = true
    end
  end
  for heir in pairs(heirs) do
    wake(p, heir, 'p')
  end
end

-- The other side of a grant, and its delivery, in a field: length of the other side, ':', both.
local function parts_of(field)
  local length, rest = string.match(field, '^(%d+):(.*)$')
  if not length then
    return '', ''  -- of another program
  end
  return string.sub(rest, 1, tonumber(length)), string.sub(rest, tonumber(length) + 1)
end

local function field_of(other, delivery)
  return #other .. ':' .. other .. delivery
end

-- Drop the grants of a stream, or of a session.
local function drop_grants(p, of_kind, of, other_kind)
  for _, field in ipairs(call('HKEYS', p .. of_kind .. of)) do
    local other, delivery = parts_of(field)
    call('HDEL', p .. other_kind .. other, field_of(of, delivery))
  end
  call('DEL', p .. of_kind .. of)
end

-- Drop the grants of one delivery of a session.
local function drop_delivery(p, session, delivery)
  local at = p .. 'sg:' .. session
  for _, field in ipairs(call('HKEYS', at)) do
    local stream, found = parts_of(field)
    if found == delivery then
      call('HDEL', at, field)
      call('HDEL', p .. 'g:' .. stream, field_of(session, delivery))
    end
  end
end

local function drop_session(p, key)
  drop_grants(p, 'sg:', key, 'g:')
  local owner = call('HGET', p .. 's:' .. key, 'o')
  if owner then
    call('ZREM', p .. 'sp:' .. owner, key)
  end
  call('ZREM', p .. 'sessions', key)
  call('DEL', p .. 's:' .. key)
end

-- Forget sessions that the store has let expire: at most a few at a time.
local function drop_expired(p, now)
  for _, key in ipairs(call('ZRANGE', p .. 'sessions', '-inf', now, 'BYSCORE', 'LIMIT', 0, 20)) do
    drop_session(p, key)
  end
end

-- Add an entry to the lines of a stream, as the last one. The marks of streams were compared before:
-- an entry that keeps this from being the last is of another program, and goes.
local function add_entry(lines, id, field, body)
  local added = redis.pcall('XADD', lines, id, field, body)
  if type(added) ~= 'table' or not added.err then
    return
  end
  if string.find(added.err, 'smaller') or string.find(added.err, 'exhausted') then
    redis.log(redis.LOG_WARNING, 'mcp-streams deletes foreign entries: ' .. lines)
    local ours = redis.call('XRANGE', lines, '-', '(' .. id)
    redis.call('DEL', lines)  -- else an id that was ever used is refused, too
    for _, entry in ipairs(ours) do
      if #entry[2] == 2 then
        redis.call('XADD', lines, entry[1], entry[2][1], entry[2][2])
      end
    end
  end
  call('XADD', lines, id, field, body)
end

-- Whether a replica is known to be gone: others have claimed its streams.
local function is_gone(p, replica)
  return call('ZSCORE', p .. 'gone', replica) ~= false
end

-- The operations of a commit, by their first letters. Each takes its arguments from `a` at `i`, and
-- returns where the next operation begins.
local OPERATIONS = {
  -- a record: stream, mark, progress
  R = function(p, a, i)
    call('HSET', p .. 'r:' .. a[i], 'k', a[i + 1], 'p', a[i + 2])
    return i + 3
  end,
  -- a new record: stream, mark, progress, identity, origin
  C = function(p, a, i)
    call('HSET', p .. 'r:' .. a[i], 'k', a[i + 1], 'p', a[i + 2], 'i', a[i + 3], 'o', a[i + 4])
    return i + 5
  end,
  -- delete a stream
  D = function(p, a, i)
    local record = p .. 'r:' .. a[i]
    local names = call('HGET', record, 'n') or ''
    for at = 1, #names, 16 do
      local name = p .. 'm:' .. string.sub(names, at, at + 15)
      if call('GET', name) == a[i] then
        call('DEL', name)
      end
    end
    call('DEL', record, p .. 'l:' .. a[i])
    return i + 1
  end,
  -- lines: stream, id, body
  L = function(p, a, i)
    add_entry(p .. 'l:' .. a[i], a[i + 1], 'b', a[i + 2])
    return i + 3
  end,
  -- a gap in the lines: stream, first and last seq
  G = function(p, a, i)
    local lines = p .. 'l:' .. a[i]
    for _, entry in ipairs(call('XRANGE', lines, a[i + 1], '+')) do
      call('XDEL', lines, entry[1])
    end
    add_entry(lines, a[i + 2] .. '-0', 'g', '')
    return i + 3
  end,
  -- trim the lines: stream, the first seq that is kept
  T = function(p, a, i)
    call('XTRIM', p .. 'l:' .. a[i], 'MINID', a[i + 1])
    return i + 2
  end,
  -- delete the lines: stream
  X = function(p, a, i)
    call('DEL', p .. 'l:' .. a[i])
    return i + 1
  end,
  -- an index: its name, score, member
  A = function(p, a, i)
    call('ZADD', p .. a[i], a[i + 1], a[i + 2])
    return i + 3
  end,
  M = function(p, a, i)
    call('ZREM', p .. a[i], a[i + 1])
    return i + 2
  end,
  -- a member of an owner's index, unless the stream is its own: owner, stream, member
  Z = function(p, a, i)
    local mark = mark_of(p, a[i + 1])
    if mark == ABSENT or owner_of(mark) ~= a[i] then
      call('ZREM', p .. 'o:' .. a[i], a[i + 2])
    end
    return i + 3
  end,
  -- a name, which leads to the stream that was given it last: stream, name
  N = function(p, a, i)
    local record = p .. 'r:' .. a[i]
    call('SET', p .. 'm:' .. a[i + 1], a[i])
    local names = call('HGET', record, 'n') or ''
    for at = 1, #names, 16 do
      if string.sub(names, at, at + 15) == a[i + 1] then
        return i + 2
      end
    end
    call('HSET', record, 'n', names .. a[i + 1])
    return i + 2
  end,
  -- counts of bytes: of all, of anonymous callers
  B = function(p, a, i)
    call('HINCRBY', p .. 'journal', 'bytes', a[i])
    call('HINCRBY', p .. 'journal', 'anonymous', a[i + 1])
    return i + 2
  end,
  -- pass on the posts of an owner
  I = function(p, a, i)
    pass_posts(p, a[i])
    return i + 1
  end,
  -- a session: key, record, principal's key, seconds until it expires
  S = function(p, a, i)
    local now = milliseconds()
    drop_expired(p, now)
    local key, expires_at = a[i], now + tonumber(a[i + 3]) * 1000
    local before = call('HGET', p .. 's:' .. key, 'o')
    if before and before ~= a[i + 2] then
      call('ZREM', p .. 'sp:' .. before, key)
    end
    local order = call('HINCRBY', p .. 'journal', 'order', 1)
    call('HSET', p .. 's:' .. key, 'r', a[i + 1], 'o', a[i + 2], 'n', order)
    call('ZADD', p .. 'sessions', expires_at, key)
    call('ZADD', p .. 'sp:' .. a[i + 2], expires_at, key)
    return i + 4
  end,
  -- the end of a session: key
  E = function(p, a, i)
    drop_session(p, a[i])
    return i + 1
  end,
  -- a grant: session, delivery, stream, grant, whether the stream is known to exist
  V = function(p, a, i)
    local session, delivery, stream = a[i], a[i + 1], a[i + 2]
    local is_known = call('EXISTS', p .. 's:' .. session) == 1
    if is_known and (a[i + 4] == '1' or call('EXISTS', p .. 'r:' .. stream) == 1) then
      -- A delivery continues one stream: an older grant of it may name another.
      local order = call('HINCRBY', p .. 'journal', 'order', 1)
      drop_delivery(p, session, delivery)
      call('HSET', p .. 'sg:' .. session, field_of(stream, delivery), '')
      call('HSET', p .. 'g:' .. stream, field_of(session, delivery), order .. ':' .. a[i + 3])
    end
    return i + 5
  end,
  -- the end of a grant: session, delivery
  W = function(p, a, i)
    drop_delivery(p, a[i], a[i + 1])
    return i + 2
  end,
  -- a webhook that waits: id, when it is due, webhook
  H = function(p, a, i)
    call('HSET', p .. 'webhooks', a[i], a[i + 2])
    call('ZADD', p .. 'webhooks_due', a[i + 1], a[i])
    return i + 3
  end,
  -- the end of a webhook: id
  Q = function(p, a, i)
    call('HDEL', p .. 'webhooks', a[i])
    call('ZREM', p .. 'webhooks_due', a[i])
    return i + 1
  end,
  -- the end of all grants of a stream: stream
  Y = function(p, a, i)
    drop_grants(p, 'g:', a[i], 'sg:')
    return i + 1
  end,
}

-- Tell the followers of streams that these have changed.
local function publish(p, streams)
  local changed = {}
  for _, stream in ipairs(streams) do
    for _, follower in ipairs(call('SMEMBERS', p .. 'f:' .. stream)) do
      changed[follower] = changed[follower] or {}
      table.insert(changed[follower], stream)
    end
  end
  for follower, theirs in pairs(changed) do
    if wake(p, follower, 'c' .. table.concat(theirs, '\0')) == 0 then
      -- It is gone, or follows again once it has a connection.
      for _, stream in ipairs(theirs) do
        call('SREM', p .. 'f:' .. stream, follower)
      end
    end
  end
  for _, stream in ipairs(streams) do
    if mark_of(p, stream) == ABSENT then
      call('DEL', p .. 'f:' .. stream)
    end
  end
end

-- One commit of a replica: name, its number, the number of the last one that is known to be stored,
-- how many streams it changes, how many turns it needs, for each stream its id and its mark, for each
-- turn its name and the holder, and the operations.
--
-- Answers {'done', bytes, anonymous bytes}, and if it has changed nothing: {'unknown'}, {'claimed'},
-- {'back', number stored}, {'late'}, {'changed', stream…} for streams with other marks, or
-- {'turned', name…} for turns that have ended.
local function commit(keys, args)
  local p = prefix_of(keys)
  local replica, number = args[1], tonumber(args[2])
  local count = call('HGET', p .. 'replicas', replica)
  if not count then
    return {is_gone(p, replica) and 'claimed' or 'unknown'}
  end
  local stored = last_commit(p, replica)
  if stored < tonumber(args[3]) then
    return {'back', stored}
  end
  if number <= stored then
    return {'late'}
  end
  local streams, changed, turned = {}, {'changed'}, {'turned'}
  local of_turns = 6 + 2 * tonumber(args[4])
  local first = of_turns + 2 * tonumber(args[5])
  for i = 6, of_turns - 1, 2 do
    if mark_of(p, args[i]) ~= args[i + 1] then
      table.insert(changed, args[i])
    end
    table.insert(streams, args[i])
  end
  for i = of_turns, first - 1, 2 do
    if call('GET', p .. 't:' .. args[i]) ~= args[i + 1] then
      table.insert(turned, args[i])
    end
  end
  if #changed > 1 or #turned > 1 then
    return #changed > 1 and changed or turned
  end
  call('HSET', p .. 'commits', replica, args[2])
  local i = first
  while i <= #args do
    i = OPERATIONS[args[i]](p, args, i + 1)
  end
  publish(p, streams)
  return {'done', number_in(keys[1], 'bytes'), number_in(keys[1], 'anonymous')}
end

-- Open the journal: its schema, and what identifies the server. Answers the epoch, and the counts
-- of bytes: of all, of anonymous callers.
local function open(keys, args)
  local journal = keys[1]
  call('HSETNX', journal, 'schema', args[1])
  if call('HGET', journal, 'server') ~= args[2] then
    call('HSET', journal, 'server', args[2])
    call('HINCRBY', journal, 'epoch', 1)
  end
  return {
    number_in(journal, 'epoch'), number_in(journal, 'bytes'), number_in(journal, 'anonymous')
  }
end

-- A replica is there: its name, the number of its last commit, and the newest schema that it knows.
-- Answers its state (-2: claimed, 1), and the schema of the journal: where that is newer, it has
-- not entered.
local function enter(keys, args)
  local p = prefix_of(keys)
  local schema = number_in(keys[1], 'schema')
  if schema > tonumber(args[3]) then
    return {0, schema}
  end
  for _, gone in ipairs(call('ZRANGE', p .. 'gone', '-inf', milliseconds(), 'BYSCORE', 'LIMIT', 0, 100)) do
    call('HDEL', p .. 'epochs', gone)
    call('ZREM', p .. 'gone', gone)
  end
  if is_gone(p, args[1]) then
    return {-2, schema}
  end
  call('HSETNX', p .. 'replicas', args[1], 1)
  call('HSETNX', p .. 'commits', args[1], args[2])
  call('HSET', p .. 'schemas', args[1], args[3])
  return {1, schema}
end

-- Begin a newer schema once every replica that lives knows it: while older ones are replaced one
-- after the other, all write what the oldest of them can read.
local function raise_schema(p, journal, known)
  local common, stored = tonumber(known), number_in(journal, 'schema')
  if common <= stored then
    return
  end
  for _, replica in ipairs(call('HKEYS', p .. 'replicas')) do
    common = math.min(common, tonumber(call('HGET', p .. 'schemas', replica) or 1) or 1)
  end
  call('HSET', journal, 'schema', math.max(common, stored))
end

-- A replica leaves: its name. It owns nothing.
local function leave(keys, args)
  local p = prefix_of(keys)
  for _, of in ipairs({'replicas', 'commits', 'epochs', 'schemas'}) do
    call('HDEL', p .. of, args[1])
  end
  call('DEL', p .. 'in:' .. args[1])
end

-- Whether the store has the keys of tokens with this hash: 0 yes, 1 no keys, 2 others. A replica that
-- knows none has the hash ''.
local function state_of_keys(p, hash)
  local content = hash ~= '' and call('GET', p .. 'keys')
  if hash == '' or content and redis.sha1hex(content) == hash then
    return 0
  end
  return content and 2 or 1
end

-- Renew: name, the number of its last commit, what its commits survive, the newest schema that it
-- knows, the hash of the keys of tokens. Answers its state (0: unknown, -2: claimed, 1), the number
-- of its last stored commit, the epoch, the state of the keys, and all counts.
local function renew(keys, args)
  local p = prefix_of(keys)
  local count = call('HGET', p .. 'replicas', args[1])
  local epoch, of_keys = number_in(keys[1], 'epoch'), state_of_keys(p, args[5])
  if not count then
    return {is_gone(p, args[1]) and -2 or 0, 0, epoch, of_keys}
  end
  -- Also where another program has written what is no count.
  local added = count ~= '-1' and redis.pcall('HINCRBY', p .. 'replicas', args[1], 1)
  if type(added) ~= 'number' then
    call('HSET', p .. 'replicas', args[1], 1)
  end
  local stored = last_commit(p, args[1])
  if stored >= tonumber(args[2]) then
    call('HSET', p .. 'epochs', args[1], string.format('%.0f', epoch) .. ':' .. args[3])
  end
  raise_schema(p, keys[1], args[4])
  local answer = {1, stored, epoch, of_keys}
  for _, each in ipairs(call('HGETALL', p .. 'replicas')) do
    table.insert(answer, each)
  end
  -- Whoever began to claim these may be gone, too.
  for _, each in ipairs(call('SMEMBERS', p .. 'unclaimed')) do
    table.insert(answer, each)
    table.insert(answer, '-1')
  end
  return answer
end

-- A replica has released its streams: its name.
local function released(keys, args)
  local p = prefix_of(keys)
  if call('HEXISTS', p .. 'replicas', args[1]) == 1 then
    call('HSET', p .. 'replicas', args[1], -1)
  end
  wake(p, '', 'r' .. args[1])
end

-- Begin to claim: the owner. From now on it is known to be gone.
local function begin_claim(keys, args)
  local p = prefix_of(keys)
  for _, of in ipairs({'replicas', 'commits', 'schemas'}) do
    call('HDEL', p .. of, args[1])
  end
  -- Its name is kept for a week, so that it is told when it comes back.
  call('ZADD', p .. 'gone', milliseconds() + 604800000, args[1])
  if call('ZCARD', p .. 'o:' .. args[1]) > 0 then
    call('SADD', p .. 'unclaimed', args[1])
  end
  return call('HGET', p .. 'epochs', args[1])
end

-- End a claim: the owner, who has no streams left. Posts about no stream, or forgotten ones, go.
local function end_claim(keys, args)
  local p = prefix_of(keys)
  if call('ZCARD', p .. 'o:' .. args[1]) == 0 then
    pass_posts(p, args[1])
    call('DEL', p .. 'in:' .. args[1])
    call('SREM', p .. 'unclaimed', args[1])
  end
end

-- Follow streams: the follower, the streams.
local function follow(keys, args)
  local p = prefix_of(keys)
  for i = 2, #args do
    call('SADD', p .. 'f:' .. args[i], args[1])
  end
end

-- End that: the follower, the streams.
local function unfollow(keys, args)
  local p = prefix_of(keys)
  for i = 2, #args do
    call('SREM', p .. 'f:' .. args[i], args[1])
  end
end

-- Hand bodies to a replica, those from `args[first]` on: whether the owner of the stream is meant
-- ('s', else 'd'), the sender, their number, the stream, and whether they lie in its inbox until it
-- receives them. One that is not kept goes there only if the replica does not listen: the store
-- syncs what is written. The replica is told the entry, or that there is one if it is long.
local function hand(p, replica, to, sender, number, stream, is_kept, args, first)
  for i = first, #args do
    local direct = 'd' .. sender .. '\0' .. stream .. '\0' .. args[i]
    if is_kept == '1' or wake(p, replica, direct) == 0 then
      local count = number .. '.' .. i
      local id = call('XADD', p .. 'in:' .. replica, '*', to, sender, 'c', count, 't', stream, 'b', args[i])
      local is_told = #args[i] <= TOLD_BYTES_MAX
      wake(p, replica, is_told and table.concat({'p' .. id, sender, count, stream, args[i]}, '\0') or 'p')
    end
  end
end

-- Post to the owner of a stream: stream, sender, number, whether they are kept, bodies. 0 without
-- owner.
local function post(keys, args)
  local p = prefix_of(keys)
  local mark = mark_of(p, args[1])
  local owner = mark ~= ABSENT and owner_of(mark) or ''
  if owner == '' then
    return 0
  end
  hand(p, owner, 's', args[2], args[3], args[1], args[4], args, 5)
  return 1
end

-- Send to a replica, or with '' to all others: replica, sender, number, stream, whether they are
-- kept, bodies.
local function send(keys, args)
  local p = prefix_of(keys)
  local counts
  if args[1] == '' then
    counts = call('HGETALL', p .. 'replicas')
  else
    counts = {args[1], call('HGET', p .. 'replicas', args[1]) or '-1'}
  end
  for i = 1, #counts, 2 do
    local replica = counts[i]
    local is_meant = args[1] ~= '' or replica ~= args[2]
    if is_meant and (tonumber(counts[i + 1]) or -1) >= 0 then
      hand(p, replica, 'd', args[2], args[3], args[4], args[5], args, 6)
    end
  end
end

-- Receive posts: the replica, how many at most, and the ids of those that were received before.
local function receive(keys, args)
  local inbox = prefix_of(keys) .. 'in:' .. args[1]
  for i = 3, #args do
    call('XDEL', inbox, args[i])
  end
  return call('XRANGE', inbox, '-', '+', 'COUNT', args[2])
end

-- A turn: its name, the holder, milliseconds. Answers whether the holder has it. A holder is a name
-- behind that of its replica. One whose replica is gone has lost its turn.
local function turn(keys, args)
  local p = prefix_of(keys)
  local key = p .. 't:' .. args[1]
  local holder = call('GET', key)
  if holder and holder ~= args[2] then
    local replica = string.match(holder, '^(.+)%.')
    if not (replica and is_gone(p, replica)) then
      return 0
    end
  end
  call('SET', key, args[2], 'PX', args[3])
  return 1
end

-- Renew turns: milliseconds, and for each its name and the holder. One that has ended stays so.
local function renew_turns(keys, args)
  local p = prefix_of(keys)
  for i = 2, #args, 2 do
    local key = p .. 't:' .. args[i]
    if call('GET', key) == args[i + 1] then
      call('PEXPIRE', key, args[1])
    end
  end
end

local function end_turn(keys, args)
  local key = prefix_of(keys) .. 't:' .. args[1]
  if call('GET', key) == args[2] then
    call('DEL', key)
  end
end

-- Take webhooks: those that are due at this time, the time at which they are due again, how many.
-- Answers the id and the webhook of each. An id without a webhook is of another program.
local function take_webhooks(keys, args)
  local p = prefix_of(keys)
  local answer = {}
  local due = p .. 'webhooks_due'
  for _, id in ipairs(call('ZRANGE', due, '-inf', args[1], 'BYSCORE', 'LIMIT', 0, args[3])) do
    local webhook = call('HGET', p .. 'webhooks', id)
    if webhook then
      call('ZADD', due, args[2], id)
      table.insert(answer, id)
      table.insert(answer, webhook)
    else
      call('ZREM', due, id)
    end
  end
  return answer
end

-- Save the keys of tokens, unless there are some. Answers the content that is kept.
local function save_keys(keys, args)
  local key = prefix_of(keys) .. 'keys'
  call('SET', key, args[1], 'NX')
  return call('GET', key)
end

redis.register_function('@commit', commit)
redis.register_function('@save_keys', save_keys)
-- All others free memory, or keep the replicas going where none is left.
local NEED_NO_MEMORY = {
  {'@commit_freeing', commit},
  {'@open', open},
  {'@enter', enter},
  {'@leave', leave},
  {'@renew', renew},
  {'@released', released},
  {'@begin_claim', begin_claim},
  {'@end_claim', end_claim},
  {'@follow', follow},
  {'@unfollow', unfollow},
  {'@post', post},
  {'@send', send},
  {'@receive', receive},
  {'@turn', turn},
  {'@renew_turns', renew_turns},
  {'@end_turn', end_turn},
  {'@take_webhooks', take_webhooks},
}
for i = 1, #NEED_NO_MEMORY do  -- the store knows no `pairs` while it loads a library
  local name, callback = NEED_NO_MEMORY[i][1], NEED_NO_MEMORY[i][2]
  redis.register_function{function_name = name, callback = callback, flags = {'allow-oom'}}
end
